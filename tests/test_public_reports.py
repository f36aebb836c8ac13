"""Faults of other toolkits that their users reported in public, tried on this one; each test names its report."""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from children import run_ranks
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard

import quant
from quant.cli.main import main

transformers = pytest.importorskip("transformers", reason="the extra hf")
IDS = torch.arange(3, 35).reshape(2, 16)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits  # type: ignore[no-any-return]


def other(model: Any) -> Any:
    """The model after some training."""
    trained = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.5).add_(0.01 * torch.randn_like(parameter))
    return trained


# Weights of rollouts.


def test_a_sync_in_pieces_leaves_no_stale_experts() -> None:
    """github.com/NovaSky-AI/SkyRL/issues/1680: the second chunked sync of a mixture of experts corrupted it."""
    model = tiny_models.mixtral(gain=2).eval()
    rollout, trained = (quant.quantize(m, "nvfp4a16").model for m in (copy.deepcopy(model), other(model)))
    first = {name: tensor.clone() for name, tensor in rollout.state_dict().items()}
    before, after = logits(rollout), logits(trained)
    assert not torch.equal(before, after)
    for state, expected in ((trained.state_dict(), after), (first, before), (trained.state_dict(), after)):
        items = list(state.items())
        for start in range(0, len(items), 3):
            rollout.load_state_dict(dict(items[start : start + 3]), strict=False)
            logits(rollout)
        assert torch.equal(logits(rollout), expected)


def test_weights_in_16_bit_are_no_half_of_a_sync() -> None:
    """github.com/vllm-project/vllm/issues/17272: the trainer's BF16 weights ended in an assertion about a shape."""
    model = tiny_models.llama().eval()
    rollout = quant.quantize(copy.deepcopy(model), "fp8_channel").model
    before = logits(rollout)
    with pytest.raises(RuntimeError, match="quantize a model that has the new weights, by the same plan"):
        rollout.load_state_dict(other(model).to(torch.bfloat16).state_dict(), strict=False)
    trained = other(model)
    rollout.load_state_dict(quant.quantize(trained, "fp8_channel").model.state_dict())
    assert torch.equal(logits(rollout), logits(trained)) and not torch.equal(logits(rollout), before)


def test_a_sync_with_adapters_leaves_the_base_as_it_is() -> None:
    """github.com/modelscope/ms-swift/pull/10154: merging for a sync and unmerging moved the frozen base."""
    peft = pytest.importorskip("peft", reason="the extra peft")
    base = quant.quantize(tiny_models.llama(gain=2).eval(), "nvfp4a16").model
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    options = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(base, quant.lora(peft.LoraConfig(**options), base))
    expected = logits(model)
    merged = [logits(quant.merge_lora(copy.deepcopy(model)).model) for _ in range(2)]
    assert torch.equal(*merged) and not torch.equal(merged[0], expected)
    assert torch.equal(logits(model), expected)
    after = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): t for name, t in model.state_dict().items()
    }
    assert all(torch.equal(after[name].float(), tensor.float()) for name, tensor in before.items())
    quant.merge_lora(model)
    with pytest.raises(ValueError, match=r"merges it in place, a copy\.deepcopy\(model\) if training goes on"):
        quant.merge_lora(model)


@pytest.mark.parametrize("format", ["nvfp4", "fp8"])
def test_a_sync_by_the_names_of_buffers_reaches_every_layer(format: str, tmp_path: Path) -> None:
    """PyTorch names a tensor that q, k and v share once: a loop over `named_buffers` left k and v with old scales."""
    rollout, trained = (quant.quantize(tiny_models.llama(seed=n, gain=2).eval(), format, IDS) for n in range(2))
    quant.save(rollout.model, rollout.plan, tmp_path / "out")
    for model in (rollout.model, quant.load(tmp_path / "out")):
        assert not torch.equal(logits(model), logits(trained.model))
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, tensor in (*trained.model.named_parameters(), *trained.model.named_buffers()):
                held[name].copy_(tensor)
            called = torch.func.functional_call(rollout.model, trained.model.state_dict(), IDS).logits
        assert torch.equal(logits(model), logits(trained.model))
        assert torch.equal(called, logits(trained.model))


# Distributed training.


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "fp8"])
def test_quantized_weights_survive_a_distributed_checkpoint(format: str, tmp_path: Path) -> None:
    """github.com/NVIDIA/TransformerEngine/pull/2974: DCP lost or misread the storage of quantized tensors."""
    model = tiny_models.llama(gain=2).eval()
    saved, loaded = (quant.quantize(m, format, IDS).model for m in (copy.deepcopy(model), other(model)))
    store = dcp.FileSystemWriter(tmp_path)
    dcp.save(saved.state_dict(), storage_writer=store, no_dist=True)
    assert not torch.equal(logits(loaded), logits(saved))
    state = loaded.state_dict()
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    loaded.load_state_dict(state)
    assert torch.equal(logits(loaded), logits(saved))


def test_formats_are_chosen_for_frozen_parameters() -> None:
    """github.com/NVIDIA/Model-Optimizer/pull/1563: the FSDP2 loader freezes all, and formats were not chosen then."""
    model = tiny_models.llama(gain=2).eval()
    frozen = copy.deepcopy(model).requires_grad_(False)
    plans = [quant.quantize(m, bits=6.0, data=IDS).plan for m in (model, frozen)]
    formats, of_frozen = ([layer.formats for layer in plan.layers] for plan in plans)
    assert formats == of_frozen and len({layer.formats for layer in plans[0].quantized}) > 1
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


def _broken_shard(rank: int, folder: str) -> None:
    """Two ranks share a model, and a gradient is NaN in the shard of one of them."""
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2, timeout=wait)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for broken in range(2):
        model = tiny_models.llama(num_hidden_layers=1).train()
        quant.to_low_precision_training(model, "mxfp8", on_nonfinite="skip")
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        model(input_ids=IDS, labels=IDS).loss.backward()
        weight = model.model.layers[0].mlp.down_proj.weight
        if rank == broken:
            weight.grad.to_local()[0, 0] = torch.nan
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        with pytest.warns(UserWarning, match=r"down_proj: its gradient holds NaN.*; this step is skipped"):
            optimizer.step()
        assert all(map(torch.equal, [parameter.to_local() for parameter in model.parameters()], before))
    # Weights of a rollout go from rank to rank. Gloo knows no FP8, and takes it as bytes.
    rollout = quant.quantize(tiny_models.llama(seed=rank, num_hidden_layers=1), "fp8_channel").model
    before = logits(rollout)
    for tensor in rollout.state_dict().values():
        dist.broadcast(tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor, 0)
    sent = quant.quantize(tiny_models.llama(seed=0, num_hidden_layers=1), "fp8_channel").model
    assert torch.equal(logits(rollout), logits(sent)) and torch.equal(logits(rollout), before) == (rank == 0)
    dist.destroy_process_group()


def test_ranks_see_each_others_nan_and_weights(tmp_path: Path) -> None:
    """github.com/pytorch/pytorch/pull/115710: infinity in one rank's shard was not seen by the others."""
    run_ranks(_broken_shard, (str(tmp_path),), 2)


# Encoder-decoders and towers in transformers.


SIZES = {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
SIZES |= {"tie_word_embeddings": False, "decoder_start_token_id": 0}


def untied(folder: Path) -> Any:
    """github.com/huggingface/transformers/issues/48154: T5 whose encoder took its embedding from the head."""
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**SIZES)).eval()
    model.lm_head.weight = torch.nn.Parameter(0.05 * torch.randn(64, 64))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors.pop("shared.weight")
    tensors = {name: tensor for name, tensor in tensors.items() if "embed_tokens" not in name}
    kept = {"decoder.embed_tokens.weight": embedding, "lm_head.weight": model.lm_head.weight.detach()}
    save_file({**tensors, **kept}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return model


def shared(folder: Path) -> Any:
    """github.com/huggingface/transformers/pull/47620: LongT5, of whose embeddings a checkpoint has `shared` alone."""
    model = transformers.LongT5ForConditionalGeneration(transformers.LongT5Config(**SIZES)).eval()
    model.encoder.embed_tokens.weight = model.decoder.embed_tokens.weight = model.shared.weight
    model.lm_head.weight = model.shared.weight
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {n: t for n, t in tensors.items() if "embed_tokens" not in n and "lm_head" not in n}
    tensors["shared.weight"] = model.shared.weight.detach()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return model


def encoder(folder: Path) -> Any:
    """github.com/huggingface/transformers/pull/43880: an encoder of UMT5 whose embedding was zeros after loading."""
    model = transformers.UMT5EncoderModel(transformers.UMT5Config(**SIZES)).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("make", [untied, shared, encoder])
def test_embeddings_stay_what_they_were(make: Callable[[Path], Any], tmp_path: Path) -> None:
    """In the model as it is opened, in the quantized one, and in what is loaded from its checkpoint."""
    torch.manual_seed(0)
    model = make(tmp_path / "model")

    def outputs(of: Any) -> torch.Tensor:
        inputs = {"input_ids": IDS} if make is encoder else {"input_ids": IDS, "decoder_input_ids": IDS[:, :8]}
        with torch.no_grad():
            return of(**inputs)[0]  # type: ignore[no-any-return]

    expected = outputs(model)
    assert torch.equal(outputs(quant.open_model(tmp_path / "model").model.eval()), expected)
    arguments = ["quantize", str(tmp_path / "model"), "--format", "int8a16", "--effort", "0", "--quiet"]
    done = CliRunner().invoke(main, [*arguments, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    loaded = outputs(quant.load(tmp_path / "out"))
    assert (loaded - expected).norm() < 0.02 * expected.norm()
    by_transformers = type(model).from_pretrained(tmp_path / "out").eval()
    assert (outputs(by_transformers) - loaded).norm() < 1e-5 * loaded.norm()


# GGUF.


def quantized_gguf(model: Any, folder: Path) -> Path:
    model.eval().save_pretrained(folder / "model")
    arguments = ["quantize", str(folder / "model"), "--format", "q8_0", "--effort", "0", "--quiet"]
    done = CliRunner().invoke(main, [*arguments, "--out", str(folder / "model.gguf")])
    assert done.exit_code == 0, done.output
    return folder / "model.gguf"


def test_long_rope_of_transformers_5_has_its_factors(tmp_path: Path) -> None:
    """github.com/ggml-org/llama.cpp/issues/24820: `rope_parameters` for `rope_scaling`, and Phi-3 lost its factors."""
    gguf = pytest.importorskip("gguf", reason="the extra hf")
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    sizes = {**tiny_models.DECODER, "original_max_position_embeddings": 16, "pad_token_id": 0}
    path = quantized_gguf(tiny_models.build("Phi3", "ForCausalLM", sizes, rope_scaling=rope), tmp_path)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert "rope_scaling" not in config and config["rope_parameters"]["rope_type"] == "longrope"
    reader = gguf.GGUFReader(path)
    factors = {tensor.name: set(tensor.data.tolist()) for tensor in reader.tensors if "rope" in tensor.name}
    assert factors == {"rope_factors_long.weight": {4.0}, "rope_factors_short.weight": {1.0}}
    ratio = config["max_position_embeddings"] / 16
    attn_factor = (1 + torch.tensor(ratio).log() / torch.tensor(16.0).log()).sqrt()
    assert reader.fields["phi3.rope.scaling.attn_factor"].contents() == pytest.approx(float(attn_factor))


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_scaled_rope_comes_back_from_a_file(kind: str, tmp_path: Path) -> None:
    """github.com/onnxruntime/mobius/pull/458: readers of GGUF files left `rope.scaling` out."""
    pytest.importorskip("gguf", reason="the extra hf")
    options = {"linear": {}, "yarn": {"original_max_position_embeddings": 32}, "llama3": {
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    }}[kind]  # fmt: skip
    scaled = tiny_models.llama(rope_scaling={"rope_type": kind, "factor": 4.0, **options}, gain=4)
    path = quantized_gguf(scaled, tmp_path)
    ids = torch.randint(3, 60, (2, 60))
    with torch.no_grad():
        expected, found = scaled(ids).logits, quant.open_model(path).model.eval()(ids).logits.float()
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_added_tokens_are_matched_whole() -> None:
    """github.com/ggml-org/llama.cpp/issues/15842: tokens of one's own, which are not special, were not recognized."""
    tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers")
    gguf = pytest.importorskip("gguf", reason="the extra hf")
    from quant.export.gguf.export_gguf import vocabulary

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    own = tokenizers.Tokenizer(tokenizers.models.BPE({t: i for i, t in enumerate([*alphabet, "ab"])}, [("a", "b")]))
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own)
    tokenizer.add_tokens(["Section5A"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|law|>"]})
    words, kinds = vocabulary(tokenizer, 264), gguf.TokenType
    ids = tokenizer.convert_tokens_to_ids(["ab", "Section5A", "<|law|>"])
    assert [words["tokenizer.ggml.tokens"][i] for i in ids] == ["ab", "Section5A", "<|law|>"]
    types = words["tokenizer.ggml.token_type"]
    assert [types[i] for i in ids] == [kinds.NORMAL, kinds.USER_DEFINED, kinds.CONTROL]
    assert set(types[len(tokenizer) :]) == {kinds.UNUSED}


def test_a_hybrid_without_attention_is_measured_and_calibrated() -> None:
    """transformers asks its cache for a length that only attention has: nothing here needs the cache."""
    config = transformers.Lfm2Config(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "conv"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Lfm2ForCausalLM(config).eval()
    rows = torch.arange(3, 35).reshape(2, 16)
    with torch.no_grad():
        logits = model(rows, use_cache=False).logits[:, :-1]
    right = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), rows[:, 1:].flatten()).exp()
    assert quant.evaluate(model, rows).perplexity == pytest.approx(float(right), rel=1e-5)
    assert quant.quantize(model, "int4a16_g32", rows, solver="gptq").plan.quantized
