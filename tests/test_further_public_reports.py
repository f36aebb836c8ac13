"""More faults of other toolkits that their users reported in public, tried on this one; each test names its reports."""

from __future__ import annotations

import copy
import datetime
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
from children import run_ranks
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import quant
from quant.base.errors import UserError
from quant.cli.main import main
from quant.kernels.base.weight_layout import is_prepacked
from quant.kernels.linear import quantized_module

transformers = pytest.importorskip("transformers", reason="the extra hf")
IDS = torch.arange(3, 35).reshape(2, 16)
NAME = "model.layers.0.mlp.down_proj"


def logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**(inputs or {"input_ids": IDS})).logits  # type: ignore[no-any-return]


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def packed(format: str, seed: int = 0, **options: Any) -> Any:
    return quant.quantize(tiny_models.llama(seed=seed, gain=2, **options).eval(), format, effort=0).model


# Weights of rollouts.


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """This CPU is taken for a Hopper GPU, on which weights lie in the order of a kernel."""
    monkeypatch.setattr(quantized_module, "prefers_prepacked", lambda codes: codes.device.type == "cpu")


@pytest.mark.usefixtures("hopper")
def test_a_layout_of_kernels_takes_every_sync() -> None:
    """github.com/verl-project/verl/issues/7978: a kernel's layout has other dimensions, and the first sync ended there.

    github.com/vllm-project/vllm-ascend/pull/15666: the sync made a new tensor, and captured graphs read the old one.
    """
    rollout, trained = (
        packed("nvfp4a16", seed, dtype=torch.bfloat16, hidden_size=128, intermediate_size=256) for seed in range(2)
    )
    before, after = logits(rollout), logits(trained)
    layer = rollout.get_submodule(NAME)
    assert is_prepacked(layer.stored_weight) and not torch.equal(before, after)
    places = [tensor.data_ptr() for tensor in (layer.codes, layer.scale, layer.global_scale)]
    own = {name: tensor.clone() for name, tensor in rollout.state_dict().items()}
    for state, expected in ((trained.state_dict(), after), (own, before), (trained.state_dict(), after)):
        rollout.load_state_dict(state)
        assert torch.equal(logits(rollout), expected)
        assert [tensor.data_ptr() for tensor in (layer.codes, layer.scale, layer.global_scale)] == places


@pytest.mark.parametrize("format", ["nvfp4a16", "fp8_block@16bit", "int4a16_g32", "mxfp6_e3m2@16bit"])
def test_averages_are_swapped_in_and_out(format: str) -> None:
    """github.com/open-mmlab/mmengine/pull/266: what was kept for the way back changed with the swap.

    github.com/ultralytics/yolov5/issues/5240: averages are written through the tensors of `state_dict().items()`.
    """
    model, average = packed(format, 0), packed(format, 1)
    before, after = logits(model), logits(average)
    kept = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(average.state_dict()[name])
    assert torch.equal(logits(model), after)
    model.load_state_dict(kept)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("format", ["nvfp4", "fp8", "int8"])
def test_a_copy_of_a_packed_model_has_weights_of_its_own(format: str) -> None:
    """github.com/lucidrains/ema-pytorch/issues/6: models that `copy.deepcopy` does not copy have no average."""
    model, other = packed(format, 0), packed(format, 1)
    twin = copy.deepcopy(model)
    before = logits(model)
    assert torch.equal(logits(twin), before)
    twin.load_state_dict(other.state_dict())
    assert torch.equal(logits(twin), logits(other)) and torch.equal(logits(model), before)


def test_scales_of_blocks_are_sent_as_files_hold_them() -> None:
    """github.com/vllm-project/vime/pull/133: scales were packed for another engine, which had no room for them."""
    sizes = {"hidden_size": 192, "intermediate_size": 320}  # no multiples of 128
    rollout, trained = (packed("fp8_block@16bit", seed, **sizes) for seed in range(2))
    state = trained.state_dict()
    assert state[f"{NAME}.scale"].shape == (2, 3) and state[f"{NAME}.codes"].shape == (192, 320)
    rollout.load_state_dict(state)
    assert torch.equal(logits(rollout), logits(trained))


def test_a_head_that_is_the_embedding_follows_a_sync() -> None:
    """github.com/NVIDIA-NeMo/Megatron-Bridge/pull/2737: of tied weights one was sent, and one expected."""
    rollout, trained = (packed("fp8_channel", seed, tie_word_embeddings=True) for seed in range(2))
    state = trained.state_dict()
    state.pop("lm_head.weight", None)  # one of the two names
    rollout.load_state_dict(state, strict=False)
    assert rollout.lm_head.weight is rollout.model.embed_tokens.weight
    assert torch.equal(logits(rollout), logits(trained))


# Distributed training.


def _begin(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2, timeout=wait)


def _adapters_in_ddp(rank: int, folder: str) -> None:
    import peft

    _begin(rank, folder)
    for format in ("nvfp4", "int8", "fp8"):
        torch.manual_seed(0)
        base = packed(format, num_hidden_layers=1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = peft.get_peft_model(base, quant.lora(config, base))
        alone = copy.deepcopy(model)
        ids = IDS[rank : rank + 1]
        wrapped = DistributedDataParallel(model)
        assert torch.equal(logits(model), logits(alone))  # what DDP sends to all ranks at its start
        wrapped(input_ids=ids, labels=ids).loss.backward()
        for row in IDS.split(1):
            (alone(input_ids=row, labels=row).loss / 2).backward()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        grads = [(a.grad, b.grad) for a, b in pairs if b.grad is not None]
        assert grads
        for found, expected in grads:
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    # QAT: each rank packs the model that all have trained.
    model = tiny_models.llama(num_hidden_layers=1, gain=2).train()
    quant.prepare_qat(model, "fp8", IDS, track_inputs=2)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(2):
        wrapped(input_ids=IDS[rank : rank + 1] + rank, labels=IDS[rank : rank + 1]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    quant.pack(model)
    for tensor in model.state_dict().values():
        of_all = [torch.empty_like(raw := tensor.contiguous().flatten().view(torch.uint8)) for _ in range(2)]
        dist.all_gather(of_all, raw)
        assert torch.equal(*of_all)
    # DDP's last reference to the group would join a thread of Gloo that waits for the interpreter.
    del wrapped
    dist.barrier()
    dist.destroy_process_group()


def test_quantized_layers_in_ddp(tmp_path: Path) -> None:
    """DDP joins all weights into buckets at its start, and quantized tensors of others refuse to be joined or copied.

    github.com/pytorch/ao/issues/1665 (NF4), github.com/modelscope/DiffSynth-Studio/pull/1674 (INT8),
    github.com/vllm-project/compressed-tensors/pull/603 (FP8 is sent as bytes); and
    github.com/pytorch/pytorch/issues/33648: what observers of QAT have seen stayed on its rank.
    """
    pytest.importorskip("peft", reason="the extra training")
    run_ranks(_adapters_in_ddp, (str(tmp_path),), 2)


def _sharded(rank: int, folder: str) -> None:
    _begin(rank, folder)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    # A packed model, whose layers have no parameter to shard.
    whole = packed("int8", num_hidden_layers=1)
    model = copy.deepcopy(whole)
    fully_shard(model, mesh=mesh)
    torch.testing.assert_close(logits(model), logits(whole), rtol=1e-5, atol=1e-5)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert full.keys() == whole.state_dict().keys() or rank
    assert rank or all(torch.equal(full[name], tensor) for name, tensor in whole.state_dict().items())
    # QAT, cast after it was sharded; then whole on one rank, packed and saved.
    model = tiny_models.llama(num_hidden_layers=1, gain=2).train()
    quant.prepare_qat(model, "nvfp4a16")
    fully_shard(model, mesh=mesh)
    model(input_ids=IDS, labels=IDS).loss.backward()
    torch.optim.SGD(model.parameters(), 0.05).step()
    model.to(torch.bfloat16)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        alone = tiny_models.llama(num_hidden_layers=1, gain=2)
        quant.prepare_qat(alone, "nvfp4a16")
        alone.load_state_dict(full)
        plan = quant.pack(alone)
        quant.save(alone.eval(), plan, Path(folder) / "out")
        assert torch.equal(logits(quant.load(Path(folder) / "out")), logits(alone))
    dist.barrier()
    dist.destroy_process_group()


def test_quantized_layers_in_fsdp2(tmp_path: Path) -> None:
    """github.com/huggingface/optimum-quanto/issues/396: a quantized model in FSDP.

    github.com/dropbox/hqq/pull/17: a layer's own `state_dict` did not survive it.
    github.com/pytorch/pytorch/issues/138467: no state after `.to(dtype)`; and
    github.com/neuralmagic/sparseml/pull/2183: what was trained in FSDP was saved as nobody could load it.
    """
    run_ranks(_sharded, (str(tmp_path),), 2)


# Encoder-decoders and towers in transformers.


def seeing(model: Any) -> dict[str, torch.Tensor]:
    """Inputs of the tiny LLaVA: 16 patches of an image and a text behind them."""
    ids = torch.full((1, 24), 7)
    ids[:, 1:17] = model.config.image_token_id
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "pixel_values": pixels}


@pytest.mark.parametrize(
    ("parts", "format"),
    [
        (["language_model"], "fp8_channel"),
        (["language_model", "vision_tower"], "nvfp4a16"),
        (["language_model", "multi_modal_projector"], "int8a16"),
    ],
)
def test_a_tower_is_loaded_as_it_was_saved(parts: list[str], format: str, tmp_path: Path) -> None:
    """github.com/NVIDIA/Model-Optimizer/pull/1691: a quantized tower crashed the export, or saw other images.

    github.com/vllm-project/vllm/pull/8822: the language model alone; and github.com/Blaizzy/mlx-vlm/pull/1309: a
    projector in codes behind a tower without, which the loader took for one without, too.
    """
    model = tiny_models.llava(gain=2).eval()
    inputs = seeing(model)
    expected = logits(model, **inputs)
    include = [f"*{part}*" for part in parts] if len(parts) > 1 else []  # towers stay in 16 bit without
    done = quant.quantize(model, format, effort=0, include=include)
    assert {layer.name.split(".")[1] for layer in done.plan.quantized} == {*parts}
    quant.save(done.model, done.plan, tmp_path / "out")
    found = logits(quant.load(tmp_path / "out"), **inputs)
    assert torch.equal(found, logits(done.model, **inputs)) and distance(found, expected) < 0.3
    blind = {**inputs, "pixel_values": torch.zeros_like(inputs["pixel_values"])}
    assert distance(logits(quant.load(tmp_path / "out"), **blind), found) > 1e-4  # the image counts


def test_a_tower_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    """github.com/kekzl/imp/issues/1246: a tower was loaded in part, and answered about images that it never saw."""
    done = quant.quantize(tiny_models.llava(gain=2).eval(), "int8", effort=0)
    quant.save(done.model, done.plan, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if "vision_tower" in n and n.endswith("q_proj.bias"))
    save_file({n: t for n, t in tensors.items() if n != name}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"vision_tower.*q_proj.bias"):
        quant.load(tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_tower_is_cast_without_its_codes(dtype: torch.dtype) -> None:
    """github.com/vllm-project/vllm/pull/42869: `tower.to(dtype)` also cast the codes and scales in it."""
    model = tiny_models.llava(gain=2).eval()
    inputs = seeing(model)
    done = quant.quantize(model, "fp8_channel", effort=0, include=["*vision_tower*"])
    before = {n: b.clone() for n, b in done.model.named_buffers() if n.endswith((".codes", ".scale"))}
    expected = logits(done.model, **inputs)
    done.model.model.vision_tower.to(dtype)
    done.model.model.vision_tower.float()
    after = dict(done.model.named_buffers())
    assert all(after[n].dtype == b.dtype and torch.equal(after[n].float(), b.float()) for n, b in before.items())
    assert distance(logits(done.model, **inputs), expected) < 0.05  # norms and embeddings went through 16 bit


def test_a_tower_in_a_file_of_its_own(tmp_path: Path) -> None:
    """github.com/kekzl/imp/pull/1384: all tensors of a tower lay in one shard, which the loader dropped as a whole."""
    model = tiny_models.llava(gain=2).eval()
    inputs = seeing(model)
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    command = ["quantize", str(tmp_path / "model"), "--format", "int8a16", "--effort", "0", "--quiet"]
    done = CliRunner().invoke(main, [*command, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    found = logits(quant.load(tmp_path / "out"), **inputs)
    assert distance(found, logits(model, **inputs)) < 0.05


def test_widths_that_no_block_divides_stay_in_16_bit(tmp_path: Path) -> None:
    """github.com/NVIDIA/Model-Optimizer/pull/1687: 4,304 values in a row of a tower, which no engine loaded."""
    vision = transformers.CLIPVisionConfig(**{**tiny_models.IMAGES, "intermediate_size": 72})
    text = transformers.LlamaConfig(**tiny_models.DECODER)
    sizes = {"text_config": text, "vision_config": vision, "image_token_index": 5}
    model = tiny_models.build("Llava", "ForConditionalGeneration", sizes, gain=2).eval()
    done = quant.quantize(model, "nvfp4a16", effort=0, include=["*vision_tower*"])
    kept = [layer for layer in done.plan.layers if "vision_tower" in layer.name and layer.name.endswith("fc2")]
    assert kept and all(layer.weight is None and "72" in layer.reason for layer in kept)
    quant.save(done.model, done.plan, tmp_path / "out")
    inputs = seeing(model)
    assert torch.equal(logits(quant.load(tmp_path / "out"), **inputs), logits(done.model, **inputs))


@pytest.mark.parametrize("tied", [True, False])
def test_t5_scales_what_a_tied_head_reads(tied: bool, tmp_path: Path) -> None:
    """github.com/ml-explore/mlx-examples/pull/591: the decoder's output was scaled in the models that are not tied."""
    model = tiny_models.t5(tie_word_embeddings=tied, gain=2).eval()
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :8]}
    expected = logits(model, **inputs)
    model.save_pretrained(tmp_path / "model")
    command = ["quantize", str(tmp_path / "model"), "--format", "int8a16", "--effort", "0", "--quiet"]
    done = CliRunner().invoke(main, [*command, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert distance(logits(quant.load(tmp_path / "out"), **inputs), expected) < 0.05


# GGUF.


def as_gguf(model: Any, folder: Path, format: str = "q8_0") -> tuple[Path, str]:
    model.eval().save_pretrained(folder / "model")
    command = ["quantize", str(folder / "model"), "--format", format, "--effort", "0"]
    done = CliRunner().invoke(main, [*command, "--out", str(folder / "model.gguf")])
    assert done.exit_code == 0, done.output
    return folder / "model.gguf", done.stderr + done.stdout


def read_back(path: Path) -> torch.Tensor:
    return logits(quant.open_model(path).model.eval())


def test_rows_that_no_superblock_divides_are_told() -> None:
    """github.com/ggml-org/llama.cpp/issues/14749 and pull/28474: most tensors became larger ones without an error."""
    plan = quant.make_plan(tiny_models.llama(hidden_size=128, intermediate_size=256), "q4_k")
    reasons = {layer.weight and layer.weight.name: layer.reason for layer in plan.quantized}
    assert reasons["q5_0"] == "recipe q4_k; q5_0, because in = 128 is no multiple of 256"
    assert reasons["q4_k"] == "recipe q4_k" and reasons["q8_0"].endswith("because in = 128 is no multiple of 256")


def test_rows_that_no_block_divides_stay_in_16_bit(tmp_path: Path) -> None:
    """github.com/ggml-org/llama.cpp/issues/2708: a tiny Llama with rows of 172, which no Q8_0 divides."""
    gguf = pytest.importorskip("gguf", reason="the extra hf")
    model = tiny_models.llama(intermediate_size=172, gain=2)
    path, said = as_gguf(model, tmp_path)
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert types["blk.0.ffn_up.weight"] == "Q8_0" and types["blk.0.ffn_down.weight"] in ("F16", "BF16", "F32")
    assert distance(read_back(path), logits(model)) < 0.02 and said


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "olmoe"])
def test_what_a_file_holds_is_the_model(family: str, tmp_path: Path) -> None:
    """Converted files of these families wrote rubbish, or were not written.

    github.com/unslothai/unsloth/issues/2860 (Qwen3), github.com/ggml-org/llama.cpp/issues/7805 (Qwen2, with biases),
    github.com/intel/auto-round/issues/1454 (stacked experts), and OLMoE, whose norms are as wide as all heads.
    """
    pytest.importorskip("gguf", reason="the extra hf")
    builders = {
        "qwen2": lambda: tiny_models.build("Qwen2", "ForCausalLM", tiny_models.DECODER, gain=2),
        "olmoe": lambda: tiny_models.build("Olmoe", "ForCausalLM", {**tiny_models.EXPERTS, "clip_qkv": None}, gain=2),
        "qwen3": lambda: tiny_models.qwen3(gain=2),
        "qwen3_moe": lambda: tiny_models.qwen3_moe(gain=2, norm_topk_prob=True),
    }  # fmt: skip
    model = builders[family]()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter)
    path, _ = as_gguf(model, tmp_path)
    assert distance(read_back(path), logits(model)) < 0.06  # in BF16; two of four experts a token


@pytest.mark.parametrize("adds", [True, False])
def test_whether_a_text_begins_with_bos_is_in_the_file(adds: bool, tmp_path: Path) -> None:
    """github.com/ggml-org/llama.cpp/issues/3966: Yi's texts have no BOS, and llama.cpp put one before them."""
    tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers")
    pytest.importorskip("gguf", reason="the extra hf")
    from quant.export.gguf.export_gguf import vocabulary

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    own = tokenizers.Tokenizer(
        tokenizers.models.BPE({t: i for i, t in enumerate(["<s>", *alphabet, "ab"])}, [("a", "b")])
    )
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    if adds:
        own.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>")
    words = vocabulary(tokenizer, 258)
    assert words["tokenizer.ggml.add_bos_token"] is adds and words["tokenizer.ggml.bos_token_id"] == 0


def test_a_rule_of_splitting_that_llama_cpp_does_not_know_is_refused() -> None:
    """github.com/ggml-org/llama.cpp/issues/7030: a rule without a name there; a default would split words elsewhere."""
    tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers")
    pytest.importorskip("gguf", reason="the extra hf")
    from quant.export.gguf.export_gguf import vocabulary

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    own = tokenizers.Tokenizer(tokenizers.models.BPE({t: i for i, t in enumerate(alphabet)}, []))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[aeiou]+"), "isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    own.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    with pytest.raises(UserError, match=r"llama\.cpp"):
        vocabulary(transformers.PreTrainedTokenizerFast(tokenizer_object=own), 256)
