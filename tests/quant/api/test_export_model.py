"""`quant.export_model` writes what `quant export` writes, of a directory as of a model in memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from torch import nn

import quant
from quant.cli.main import main

pytest.importorskip("transformers", reason="needs the extra hf")
onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)).eval()


@pytest.fixture(scope="module")
def done() -> quant.Quantized:
    return quant.quantize(perceptron(), "int8", torch.randn(5, 64))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def checkpoint(done: quant.Quantized, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    quant.save(done.model, done.plan, directory)
    return directory


def weights_of(file: Path) -> dict[str, bytes]:
    return {value.name: value.raw_data for value in onnx.load(file).graph.initializer}


def test_a_model_in_memory_becomes_the_file_of_its_checkpoint(
    done: quant.Quantized, checkpoint: Path, tmp_path: Path
) -> None:
    before = {name: tensor.clone() for name, tensor in done.model.state_dict().items()}
    options: dict[str, Any] = {"inputs": {"x": "fp16:rows,64"}, "dtype": "fp16"}
    heard: list[tuple[str, int, int]] = []
    listener = quant.Listener(lambda *counts: heard.append(counts))
    exported = quant.export_model(done, "onnx", tmp_path / "memory", **options, listener=listener)
    assert (exported.path, exported.kind) == (tmp_path / "memory", "onnx")
    assert exported.files == {file.name: file.stat().st_size for file in sorted(exported.path.iterdir())}
    assert [layer["name"] for layer in exported.layers] == [layer.name for layer in done.plan.quantized]
    assert all(layer["checkpoint"] == 0.0 for layer in exported.layers) and exported.audit == []
    assert [(at, total) for stage, at, total in heard if stage == "compare"][-1] == (2, 2)
    # The module keeps its dtype and its values, though the file is in FP16.
    after = done.model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    stored = quant.export_model(str(checkpoint), "onnx", tmp_path / "stored", module=perceptron(), **options)
    assert weights_of(exported.path / "model.onnx") == weights_of(stored.path / "model.onnx")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["memory", "stored"]


def test_layouts_and_the_default_name(tmp_path: Path) -> None:
    done = quant.quantize(tiny_models.llama(), "fp8_channel")
    first = quant.export_model(done.model, "modelopt", tmp_path / "tiny")
    assert (first.path / "hf_quant_config.json").is_file() and first.layers == []
    back = quant.export_model(first.path, "compressed-tensors")
    assert back.path == tmp_path / "tiny-compressed-tensors"
    quant.save(done.model, done.plan, tmp_path / "saved")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "saved", back.path))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in ours)


class Difference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 32)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.layer(a) - 2 * self.layer(b)


def test_inputs_go_by_their_names(tmp_path: Path) -> None:
    """They went by the order of the options, which need not be that of the parameters."""
    a, b = torch.randn(2, 3, 64)
    done = quant.quantize(Difference().eval(), "int8", run=lambda model: model(a, b), effort=0)
    exported = quant.export_model(done, "onnx", tmp_path / "out", inputs={"b": "fp32:rows,64", "a": "fp32:rows,64"})
    (y,) = onnxruntime.InferenceSession(exported.path / "model.onnx").run(None, {"a": a.numpy(), "b": b.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), done.model(a, b), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_inputs_of_a_transformers_model_go_by_their_names(tmp_path: Path) -> None:
    """Mask and tokens could change places without a word."""
    done = quant.quantize(tiny_models.bert(num_hidden_layers=1), "int8", effort=0)
    inputs = dict.fromkeys(("attention_mask", "input_ids"), "int64:batch,tokens")
    exported = quant.export_model(done, "onnx", tmp_path / "out", inputs=inputs, shapes="tokens=1:8:16")
    ids = torch.randint(3, 60, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    session = onnxruntime.InferenceSession(exported.path / "model.onnx")
    y = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(y), done.model(ids, attention_mask=mask)[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r'^inputs="input_id": BertModel has no input of this name; .* input_ids'):
        quant.export_model(done, "onnx", tmp_path / "typo", inputs={"input_id": "int64:batch,tokens"})
    with pytest.raises(ValueError, match=r'takes 512 at most of tokens: pass shapes="tokens=1:512:512"$'):
        quant.export_model(done, "onnx", tmp_path / "long", inputs=inputs)


@pytest.mark.slow
def test_the_graph_of_a_model_for_images_says_that_it_reads_tokens_only(tmp_path: Path) -> None:
    done = quant.quantize(tiny_models.llava(), "int8", effort=0)
    with pytest.warns(UserWarning, match="LlavaForConditionalGeneration reads images too, and this graph reads tokens"):
        exported = quant.export_model(done, "onnx", tmp_path / "out", capacity=0)
    assert any("reads images too" in note for note in exported.warnings)


@pytest.mark.slow
def test_values_of_another_width_than_keys(tmp_path: Path) -> None:
    """Latent attention of DeepSeek: keys of 32, values of 16. The file was an invalid one."""
    sizes = {
        **tiny_models.DECODER, "num_key_value_heads": 4, "first_k_dense_replace": 2, "kv_lora_rank": 32,
        "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "head_dim": 16,
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "pad_token_id": 0,
    }  # fmt: skip
    done = quant.quantize(tiny_models.build("DeepseekV3", "ForCausalLM", sizes), "int8", effort=0)
    exported = quant.export_model(done, "onnx", tmp_path / "out", capacity=0)
    ids = torch.randint(3, 60, (2, 7))
    y = onnxruntime.InferenceSession(exported.path / "model.onnx").run(None, {"input_ids": ids.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(y), done.model(ids).logits, rtol=1e-4, atol=1e-5)


def test_named_inputs_of_a_model_that_keeps_a_cache(tmp_path: Path) -> None:
    """The cache of Whisper's decoder was an output, which no graph can have; its encoder's states are one."""
    sizes = {
        "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "num_mel_bins": 16,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_source_positions": 50,
        "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }  # fmt: skip
    done = quant.quantize(tiny_models.build("Whisper", "ForConditionalGeneration", sizes), "int8", effort=0)
    inputs = {"input_features": torch.randn(2, 16, 100), "decoder_input_ids": torch.randint(3, 60, (2, 7))}
    exported = quant.export_model(done, "onnx", tmp_path / "out", inputs=inputs)
    session = onnxruntime.InferenceSession(exported.path / "model.onnx")
    logits, states = session.run(None, {name: x.numpy() for name, x in inputs.items()})
    expected = done.model(**inputs)
    torch.testing.assert_close(torch.from_numpy(logits), expected.logits, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(torch.from_numpy(states), expected.encoder_last_hidden_state, rtol=1e-3, atol=1e-4)
    assert done.model.config.use_cache


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ("sequence=1:8:64", "a sequence of 64 does not fit into a KV cache of 16 (capacity=)"),
        ("batch=0:0:0", "batch is 0:0:0, which leaves nothing to compute"),
    ],
)
def test_shapes_that_no_step_can_have(tmp_path: Path, shapes: str, message: str) -> None:
    done = quant.quantize(tiny_models.llama(num_hidden_layers=1), "int8", effort=0)
    with pytest.raises(ValueError, match=re.escape(message)):
        quant.export_model(done, "onnx", tmp_path / "out", capacity=16, shapes=shapes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_decoder_in_memory(tmp_path: Path) -> None:
    done = quant.quantize(tiny_models.llama(), "fp8_channel")
    quant.save(done.model, done.plan, tmp_path / "saved")
    exported = quant.export_model(done, "onnx", tmp_path / "memory", capacity=32)
    main(["export", str(tmp_path / "saved"), "--to", "onnx", "--capacity", "32", "--quiet"], standalone_mode=False)
    assert weights_of(exported.path / "model.onnx") == weights_of(tmp_path / "saved-onnx" / "model.onnx")


def test_an_example_fixes_the_sizes_of_an_input(done: quant.Quantized, tmp_path: Path) -> None:
    x = torch.randn(3, 64)
    exported = quant.export_model(done, "onnx", tmp_path / "out", inputs={"x": x})
    session = onnxruntime.InferenceSession(exported.path / "model.onnx")
    assert session.get_inputs()[0].shape == [3, 64]
    (y,) = session.run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), done.model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": "onx"}, 'to="onx": no such kind of export; known: onnx, '),
        ({"to": "onnx", "dtype": "half"}, 'dtype="half": expected one of fp32, fp16, bf16'),
        ({"to": "onnx", "capacity": "9"}, "capacity='9': expected a number of at least 0"),
        ({"to": "onnx", "target": "sm120"}, 'target="sm120": an ONNX file is for onnxruntime or tensorrt; '),
        ({"to": "modelopt", "capacity": 0}, 'to="modelopt" has no use for capacity=; '),
        ({"to": "modelopt", "data": torch.zeros(2, 4)}, 'to="modelopt" has no use for data=; '),
        ({"to": "tensorrt", "target": "sm120", "features": "fit"}, 'features="fit": expected one of refit, '),
        ({"to": "tensorrt"}, "name it with target=, such as sm120"),
        ({"to": "onnx", "inputs": {"x": "fp32:a,,3"}}, 'inputs={"x": "fp32:a,,3"}: expected NAME:DTYPE:DIMS'),
        ({"to": "onnx", "inputs": {"x": "fp32:rows,64"}, "dtype": "fp16"}, "inputs= x is in fp32, and everything"),
        ({"to": "onnx", "data": "none.txt"}, 'data="none.txt": no such file'),
        ({"to": "onnx", "out": None}, "out= is missing: a model in memory"),
    ],
)
def test_mistakes_are_one_line_that_names_the_parameter(
    done: quant.Quantized, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, OSError)) as raised:
        quant.export_model(done, **{"out": tmp_path / "out", **arguments})
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_a_plan_and_things_that_are_no_model(tmp_path: Path) -> None:
    for model, message in (
        (nn.Linear(32, 32), "Linear carries no plan"),
        (3, "takes a module, and this is a int"),
        (tmp_path / "nowhere", "nowhere: no such file or directory"),
        (tmp_path, "no quantized checkpoint"),
    ):
        with pytest.raises(quant.UserError, match=message):
            quant.export_model(model, "onnx", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_engine_and_its_audit(tmp_path: Path) -> None:
    """A batch of 1 throughout fails in TensorRT-RTX 1.7; the message has the way out, which works."""
    pytest.importorskip("tensorrt_rtx", reason="needs the extra [tensorrt-rtx]")
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    done = quant.quantize(tiny_models.llama(**sizes, dtype=torch.float16), "nvfp4", effort=0)
    out, options = tmp_path / "m.engine", {"target": "sm120", "capacity": 32}
    with pytest.raises(ValueError, match=r'let the batch range from 1 to 2 \(shapes="batch=1:1:2"\)'):
        quant.export_model(done, "tensorrt", out, shapes="batch=1:1:1,sequence=1:8:16", **options)
    assert list(tmp_path.iterdir()) == []
    exported = quant.export_model(done, "tensorrt", out, shapes="batch=1:1:2,sequence=1:8:16", **options)
    assert exported.files == {"m.engine": out.stat().st_size}
    found = {row["name"]: row["found"] for row in exported.audit if row["planned"] == "fp4"}
    assert found == dict.fromkeys((layer.name for layer in done.plan.quantized), "fp4")
