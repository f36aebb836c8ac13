"""Heads for multi-token prediction, which transformers does not run, are quantized like the last block if asked for."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import quant
from quant.cli.quantize import quantize_command
from quant.export.checkpoint.verify import verify
from quant.models.open_model import open_model
from quant.models.prediction_heads import BlocksBeforeHeads, attach_head_layer, head_layers
from quant.run.decide import split_globs
from quant.run.request import Request

transformers = pytest.importorskip("transformers", reason="the extra hf")
pytest.importorskip("compressed_tensors", reason="the extra test")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(does not run|of prediction heads|has no use for):UserWarning", "ignore:.*1.2 of the weights:UserWarning"
)
IDS = torch.arange(64).reshape(4, 16)
LATENT = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 32,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
}  # fmt: skip
LINEAR = {
    "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


def qwen3_next() -> tuple[Any, str, dict[str, torch.Tensor]]:
    model = tiny_models.build(
        "Qwen3Next", "ForCausalLM", {**tiny_models.EXPERTS, **LINEAR}, dtype=torch.bfloat16, gain=4
    )
    return model, "mtp.layers.0", {"mtp.fc.weight": torch.randn(64, 128), "mtp.norm.weight": torch.ones(64)}


def deepseek_v3() -> tuple[Any, str, dict[str, torch.Tensor]]:
    model = tiny_models.build("DeepseekV3", "ForCausalLM", {**tiny_models.DECODER, **LATENT}, dtype=torch.bfloat16)
    head = "model.layers.2"
    joined = {f"{head}.eh_proj.weight": torch.randn(64, 128), f"{head}.shared_head.head.weight": torch.randn(64, 64)}
    return model, head, {**joined, f"{head}.enorm.weight": torch.ones(64)}


def with_head(directory: Path, family: tuple[Any, str, dict[str, torch.Tensor]]) -> str:
    """Saves a model whose files hold a head: its last block with other values, and `more`."""
    model, head, more = family
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    block = {n.replace("model.layers.1.", f"{head}."): t.flip(0).contiguous() for n, t in tensors.items() if ".1." in n}
    block = {name: tensor for name, tensor in block.items() if name.startswith(f"{head}.")}
    more = {name: tensor.bfloat16() for name, tensor in more.items()}
    save_file({**tensors, **block, **more}, directory / "model.safetensors", {"format": "pt"})
    save_file({"input_ids": IDS}, directory.parent / "calib.safetensors")
    return head


def quantized(directory: Path, out: Path, *options: str) -> Path:
    calib = ("--calib", directory.parent / "calib.safetensors", "--calib-samples", 4, "--seqlen", 16)
    result = CliRunner().invoke(quantize_command, list(map(str, (directory, *options, *calib, "--out", out))))
    assert result.exit_code == 0, result.output
    return out


@pytest.mark.parametrize(
    ("family", "glob", "format"),
    [(qwen3_next, "mtp.*", "nvfp4"), (deepseek_v3, "model.layers.2.*", "fp8"), (qwen3_next, "mtp.*", "int4a16_g32")],
)
def test_a_head_is_quantized_like_the_last_block(family: Any, glob: str, format: str, tmp_path: Path) -> None:
    head = with_head(tmp_path / "model", family())
    out = quantized(tmp_path / "model", tmp_path / "out", "--format", format, "--include", glob)
    source, written = load_file(tmp_path / "model" / "model.safetensors"), load_file(out / "model.safetensors")
    plan = quant.Plan.load(out / "plan.json")
    heads = [layer for layer in plan.quantized if layer.name.startswith(f"{head}.")]
    # The block has an expert's gate and up as one tensor, and the files have them apart.
    suffixes = {name.removeprefix("model.layers.1.") for name in written if name.startswith("model.layers.1.")}
    assert {name.removeprefix(f"{head}.") for name in written if name.startswith(f"{head}.")} >= suffixes
    assert len(heads) == 4 + 4 * 3 + (3 if family is qwen3_next else 4)
    for layer in heads:
        assert layer.solver in ("rtn", "mse") and "transformers does not run it" in layer.reason
        # Of the original weight as its format rounds it: the same error as the model's own layers have.
        module = quant.load(out).get_submodule(layer.name)
        weight = source[layer.tensor_name].float()
        assert (module.quantized_weight.dequantize() - weight).norm() < 0.15 * weight.norm()
    # The projection that joins embeddings and hidden states, the head's own output head and routers stay as they are.
    table = json.loads((out / "config.json").read_text())["quantization_config"]
    for name, tensor in source.items():
        if name.endswith(("fc.weight", "eh_proj.weight", "head.weight", "gate.weight", "norm.weight")):
            assert torch.equal(written[name], tensor), name
    assert not {layer.name for layer in heads} & set(table["ignore"])
    assert f"{head}.mlp.gate" in table["ignore"]
    report = json.loads((out / "report.json").read_text())
    assert any(f"{len(heads)} layers of prediction heads" in warning for warning in report["warnings"])
    assert verify(out, source=tmp_path / "model").findings == ()


def test_the_models_own_layers_and_logits_stay_those_without_the_head(tmp_path: Path) -> None:
    with_head(tmp_path / "model", deepseek_v3())
    plain = quantized(tmp_path / "model", tmp_path / "plain", "--format", "fp8", "--effort", "0")
    out = quantized(
        tmp_path / "model", tmp_path / "out", "--format", "fp8", "--effort", "0", "--include", "*.layers.2.*"
    )
    first, second = load_file(plain / "model.safetensors"), load_file(out / "model.safetensors")
    changed = {
        n for n, t in second.items() if n not in first or first[n].dtype != t.dtype or not torch.equal(first[n], t)
    }
    assert changed and all(".layers.2." in name for name in changed)
    loaded = quant.load(out)
    assert torch.equal(loaded(IDS).logits, quant.load(plain)(IDS).logits)
    assert len(loaded.model.layers) == 2 == len(copy.deepcopy(loaded).model.layers)


def test_conversion_another_save_and_a_plan_keep_every_byte(tmp_path: Path) -> None:
    head = with_head(tmp_path / "model", qwen3_next())
    out = quantized(tmp_path / "model", tmp_path / "out", "--format", "nvfp4", "--include", "mtp.*", "--effort", "0")
    first = load_file(out / "model.safetensors")
    quant.convert(out, tmp_path / "modelopt", to="modelopt")
    (tmp_path / "modelopt" / "plan.json").unlink()
    assert f"{head}.self_attn.q_proj.weight_scale_2" in load_file(tmp_path / "modelopt" / "model.safetensors")
    quant.convert(tmp_path / "modelopt", tmp_path / "back", to="compressed-tensors")
    quant.load(out).save_pretrained(tmp_path / "again")
    quantized(tmp_path / "model", tmp_path / "planned", "--plan", str(out / "plan.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    done = quant.quantize(model, "nvfp4", IDS, include=["mtp.*"])
    quant.save(done.model, done.plan, tmp_path / "memory")
    for other in ("back", "again", "planned", "memory"):
        written = load_file(tmp_path / other / "model.safetensors")
        assert written.keys() == first.keys()
        differing = [n for n, t in written.items() if not torch.equal(t.view(torch.uint8), first[n].view(torch.uint8))]
        assert differing == [], other


def test_a_glob_for_nothing_that_can_be_quantized_is_refused(tmp_path: Path) -> None:
    with_head(tmp_path / "model", qwen3_next())
    for glob, message in (("mtp.fc", "no quantized layer in the same"), ("mtq.*", "matches no layer")):
        arguments = [str(tmp_path / "model"), "--format", "nvfp4a16", "--include", glob, "--dry-run"]
        result = CliRunner().invoke(quantize_command, arguments)
        assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output


def test_an_exact_name_is_no_glob(tmp_path: Path) -> None:
    """Read as a glob, `mtp.fc[0]` is another head's name: `mtp.fc0`."""
    model, head, _ = qwen3_next()
    with_head(tmp_path / "model", (model, head, {f"mtp.fc{n}.weight": torch.randn(64, 128) for n in ("[0]", "0", "1")}))
    source = open_model(tmp_path / "model")
    for include, exclude, heads in (
        (["mtp.fc[0]"], [], {"mtp.fc[0]"}),
        (["mtp.fc*"], ["mtp.fc[0]"], {"mtp.fc0", "mtp.fc1"}),
        (["mtp.fc[01]"], [], {"mtp.fc0", "mtp.fc1"}),
    ):
        globs = split_globs(Request(tmp_path / "model", "nvfp4a16", include=include, exclude=exclude), source)
        assert (globs.include, globs.exclude, globs.heads.keys()) == ([], [], heads)


def test_exclude_keeps_a_part_of_a_head_in_16_bit(tmp_path: Path) -> None:
    head = with_head(tmp_path / "model", deepseek_v3())
    globs = ("--include", f"{head}.*", "--exclude", f"{head}.mlp.*", "--exclude", "*.o_proj")
    out = quantized(tmp_path / "model", tmp_path / "out", "--format", "int4a16_g32", *globs)
    names = {layer.name.removeprefix(f"{head}.") for layer in quant.Plan.load(out / "plan.json").quantized}
    assert {name for name in names if name.startswith("self_attn.")} == {
        f"self_attn.{each}" for each in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    }
    assert not [name for name in names if name.startswith("mlp.")] and "model.layers.1.mlp.experts.down_proj" in names
    assert verify(out, source=tmp_path / "model").findings == ()


def test_a_budget_cannot_be_spent_on_a_head(tmp_path: Path) -> None:
    with_head(tmp_path / "model", deepseek_v3())
    arguments = [str(tmp_path / "model"), "--bits", "5", "--include", "model.layers.2.*", "--out", str(tmp_path / "o")]
    result = CliRunner().invoke(quantize_command, arguments)
    assert result.exit_code == 2 and "no allocation can measure it" in " ".join(result.output.split()), result.output


def test_a_failure_leaves_no_head_in_a_model_of_the_caller(tmp_path: Path) -> None:
    with_head(tmp_path / "model", deepseek_v3())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    names = [name for name, _ in model.named_modules()]
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(ValueError, match="norm"):
        quant.quantize(model, "fp8_channel", include=["model.layers.2.*"])
    assert [name for name, _ in model.named_modules()] == names


def test_a_list_of_blocks_hides_its_heads() -> None:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
    attach_head_layer(model, "layers.3.proj", torch.ones(2, 2))
    assert isinstance(model.layers, BlocksBeforeHeads) and len(model.layers) == 3
    assert [*model.layers][-1] is model.layers[-1] is model.layers[2] and len(model.layers[1:]) == 2
    assert [name for name, _ in model.layers.named_children()] == ["0", "1", "2"]
    assert head_layers(model) == {"layers.3.proj"} and "layers.3.proj.weight" in model.state_dict()
