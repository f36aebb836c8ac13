"""Rotary frequencies and tokens of a GGUF file, compared with llama.cpp's formulas and with the file's own metadata."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

import quant
from quant.base.errors import UserError

gguf = pytest.importorskip("gguf", reason="comes with the extra [dev]")
transformers = pytest.importorskip("transformers", reason="the extra hf")

from gguf_samples import write_gguf, write_vocabulary  # noqa: E402 -- needs gguf

from quant.models.gguf import load_tokenizer, read_config  # noqa: E402 -- as above

Metadata = Callable[[Any], object]


def frequencies(theta: float, size: int) -> np.ndarray[Any, Any]:
    return theta ** -(np.arange(0, size, 2) / size)


def read(file: Path) -> Any:
    return quant.open_model(file, dtype="float32").model


def llama(head_dim: int = 16, theta: float = 10000.0, **options: Any) -> Any:
    rope = {"rope_type": "default", "rope_theta": theta}
    return tiny_models.llama(tie_word_embeddings=True, head_dim=head_dim, rope_parameters=rope, **options)


def divisors_of_llama3(
    theta: float, size: int, factor: float, low: float, high: float, context: int
) -> np.ndarray[Any, Any]:
    """As Meta's code and llama.cpp's converter compute them: by wavelength, each frequency in one of three ranges."""
    divisors = []
    for frequency in frequencies(theta, size):
        wavelength = 2 * math.pi / frequency
        if wavelength < context / high:
            divisors.append(1.0)
        elif wavelength > context / low:
            divisors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(
    ("theta", "size", "factor", "low", "high", "context"),
    [
        (500000.0, 128, 8.0, 1.0, 4.0, 8192),  # Llama 3.1
        (500000.0, 64, 32.0, 1.0, 4.0, 8192),  # Llama 3.2 1B
        (10000.0, 16, 8.0, 1.0, 4.0, 32),
        (10000.0, 128, 4.0, 1.0, 8.0, 2048),  # no model, but the same formula
        (10000.0, 8, 16.0, 1.0, 4.0, 300),  # no wave is between the ranges
    ],
)
def test_divisors_of_llama_3_become_its_four_numbers(
    theta: float, size: int, factor: float, low: float, high: float, context: int, tmp_path: Path
) -> None:
    divisors = divisors_of_llama3(theta, size, factor, low, high, context)
    write_gguf(tmp_path / "m.gguf", llama(size, theta), divisors={"rope_freqs.weight": divisors})
    model = read(tmp_path / "m.gguf")
    parameters = model.config.rope_parameters
    assert parameters["rope_type"] == "llama3" and parameters["factor"] == factor
    if ((divisors > 1) & (divisors < factor)).any():
        assert parameters["original_max_position_embeddings"] == context
    expected = frequencies(theta, size) / divisors
    np.testing.assert_allclose(model.model.rotary_emb.inv_freq.numpy(), expected, rtol=2e-6)
    # The numbers are in the checkpoint's config, and so in transformers and in servers.
    done = quant.quantize(model, "fp8_channel", torch.arange(3, 35).view(2, 16))
    quant.save(done.model, done.plan, tmp_path / "out")
    rotary = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").model.rotary_emb
    np.testing.assert_allclose(rotary.inv_freq.numpy(), expected, rtol=2e-6)


def scaled_frequencies(metadata: Metadata, tmp_path: Path) -> tuple[np.ndarray[Any, Any], float]:
    write_gguf(tmp_path / "m.gguf", llama(max_position_embeddings=256), metadata)
    rotary = read(tmp_path / "m.gguf").model.rotary_emb
    return rotary.inv_freq.double().numpy(), rotary.attention_scaling


def test_linear_scaling(tmp_path: Path) -> None:
    def typed(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    for metadata in (typed, lambda writer: writer.add_rope_scaling_factor(4.0)):  # llama.cpp's default type is linear
        scaled, attention = scaled_frequencies(metadata, tmp_path)
        np.testing.assert_allclose(scaled, frequencies(10000.0, 16) / 4, rtol=1e-6)
        assert attention == 1.0


def test_no_scaling(tmp_path: Path) -> None:
    def none(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(4.0)

    for metadata in (none, lambda writer: writer.add_rope_scaling_factor(0.0)):
        np.testing.assert_allclose(scaled_frequencies(metadata, tmp_path)[0], frequencies(10000.0, 16), rtol=1e-6)


@pytest.mark.parametrize(("fast", "slow", "factor_of_attention"), [(None, None, None), (16.0, 2.0, 0.5)])
def test_yarn(fast: float | None, slow: float | None, factor_of_attention: float | None, tmp_path: Path) -> None:
    """Against `rope_yarn` of ggml: a ramp over the dimensions between two numbers of turns in the first context."""

    def metadata(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)
        if fast is not None:
            writer.add_rope_scaling_yarn_beta_fast(fast)
            writer.add_rope_scaling_yarn_beta_slow(slow)
            writer.add_rope_scaling_attn_factors(factor_of_attention)

    def dimension(turns: float) -> float:
        return 16 * math.log(64 / (turns * 2 * math.pi)) / (2 * math.log(10000.0))

    start = max(0, math.floor(dimension(fast or 32.0)))
    end = min(15, math.ceil(dimension(slow or 1.0)))
    ramp = 1 - np.clip((np.arange(8) - start) / max(0.001, end - start), 0, 1)
    whole = frequencies(10000.0, 16)
    scaled, attention = scaled_frequencies(metadata, tmp_path)
    np.testing.assert_allclose(scaled, whole / 4 * (1 - ramp) + whole * ramp, rtol=1e-6)
    assert attention == pytest.approx((factor_of_attention or 1.0) * (1 + 0.1 * math.log(4.0)))


def test_gemma_3_scales_its_layers_of_full_attention(tmp_path: Path) -> None:
    """llama.cpp reads `rope.freq_base_swa`, 10,000, and no scaling for the layers with a window."""

    def metadata(writer: Any) -> None:
        sentence_pieces("gemma3", flag=True)[1](writer)
        writer.add_rope_freq_base(1000000.0)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
        writer.add_sliding_window(16)

    write_vocabulary(tmp_path / "m.gguf", "gemma3", metadata)
    config = read_config(tmp_path / "m.gguf")
    rotary = transformers.models.gemma3.modeling_gemma3.Gemma3RotaryEmbedding(config)
    full, windowed = rotary.full_attention_inv_freq.numpy(), rotary.sliding_attention_inv_freq.numpy()
    np.testing.assert_allclose(full, frequencies(1000000.0, 16) / 8, rtol=1e-6)
    np.testing.assert_allclose(windowed, frequencies(10000.0, 16), rtol=1e-6)


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    def metadata(writer: Any) -> None:
        sentence_pieces("gemma3", flag=True)[1](writer)
        writer.add_uint16("split.count", 3)

    write_vocabulary(tmp_path / "m.gguf", "gemma3", metadata)
    with pytest.raises(UserError) as refused:
        read_config(tmp_path / "m.gguf")
    assert str(refused.value) == (
        f"{tmp_path / 'm.gguf'}: one of 3 files of a model; join them by llama.cpp's "
        "`llama-gguf-split --merge FIRST JOINED`"
    )


def test_longrope_of_phi_3(tmp_path: Path) -> None:
    short, long = np.linspace(1, 1.5, 8), np.linspace(1, 9, 8)

    def metadata(writer: Any) -> None:
        sentence_pieces("phi3", flag=True)[1](writer)
        writer.add_rope_freq_base(10000.0)
        writer.add_rope_dimension_count(16)
        writer.add_rope_scaling_orig_ctx_len(16)
        writer.add_rope_scaling_attn_factors(1.25)
        for name, divisors in {"short": short, "long": long}.items():
            writer.add_tensor(f"rope_factors_{name}.weight", divisors.astype(np.float32))

    write_vocabulary(tmp_path / "m.gguf", "phi3", metadata)
    config = read_config(tmp_path / "m.gguf")
    rotary = transformers.models.phi3.modeling_phi3.Phi3RotaryEmbedding(config)
    for length, divisors in ((16, short), (17, long)):
        rotary(torch.zeros(1, length, 16), torch.arange(length)[None])
        np.testing.assert_allclose(rotary.inv_freq.numpy(), frequencies(10000.0, 16) / divisors, rtol=1e-6)
    assert rotary.attention_scaling == 1.25


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.1.attn_sinks.weight", "v.blk.0.attn_q.weight"])
def test_a_tensor_that_transformers_leaves_out_is_refused(name: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", llama(), divisors={name: np.ones(64)})
    with pytest.raises(UserError, match=rf"leaves out {name}, and LlamaForCausalLM would compute something else"):
        read(tmp_path / "m.gguf")


def test_a_file_with_too_few_tensors_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", llama(num_hidden_layers=1), lambda writer: writer.add_block_count(2))
    with pytest.raises(UserError, match=r"m\.gguf: the checkpoint lacks model\.layers\.1\.\S+, .* and 6 more"):
        read(tmp_path / "m.gguf")


def test_a_head_for_multi_token_prediction_in_a_gguf_is_told(tmp_path: Path) -> None:
    heads = {"blk.1.nextn.eh_proj.weight": np.ones((64, 128)), "blk.2.attn_q.weight": np.ones((64, 64))}
    write_gguf(tmp_path / "m.gguf", llama(), divisors={**heads, "rope_freqs.weight": np.ones(8)})
    with pytest.warns(UserWarning, match=r"leaves out blk.1.nextn.eh_proj.weight, blk.2.attn_q.weight, a head for mul"):
        assert read(tmp_path / "m.gguf").config.num_hidden_layers == 2


@pytest.mark.parametrize(
    ("metadata", "divisors", "named"),
    [
        (lambda w: w.add_string("llama.rope.scaling.type", "dynamic"), {}, "rope.scaling.type is 'dynamic'"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), {}, "rope_factors_long.weight"),
        (lambda w: None, {"rope_freqs.weight": np.linspace(1, 3, 8) ** 2}, "rope_freqs.weight"),
    ],
)
def test_a_scaling_without_a_name_in_transformers_is_refused(
    metadata: Metadata, divisors: Any, named: str, tmp_path: Path
) -> None:
    def with_factor(writer: Any) -> None:
        metadata(writer)
        if not divisors:
            writer.add_rope_scaling_factor(4.0)

    write_gguf(tmp_path / "m.gguf", llama(), with_factor, divisors)
    for meta in (False, True):  # a dry run refuses it too
        with pytest.raises(UserError, match=named):
            quant.open_model(tmp_path / "m.gguf", meta=meta)


def alphabet() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())


def byte_level(pre: str, flag: bool | None, architecture: str = "llama") -> tuple[str, Metadata]:
    def metadata(writer: Any) -> None:
        pieces = [*alphabet(), "he", "ll", "hell", "hello", "\u0120w"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(["<|begin|>", "<|end|>", *pieces])
        writer.add_token_types([3, 3] + [1] * len(pieces))
        writer.add_token_merges(["h e", "l l", "he ll", "hell o", "\u0120 w"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        if flag is not None:
            writer.add_add_bos_token(flag)

    return architecture, metadata


def sentence_pieces(architecture: str, flag: bool | None) -> tuple[str, Metadata]:
    def metadata(writer: Any) -> None:
        pieces = ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "he", "ll", "hell", "hello", "\u2581hello"]
        data = [f"<0x{byte:02X}>" for byte in range(256)]
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(["<unk>", "<s>", "</s>", *data, *pieces])
        writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(pieces))])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(pieces))
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if flag is not None:
            writer.add_add_bos_token(flag)

    return architecture, metadata


VOCABULARIES = {
    "byte level, BOS": (byte_level("smollm", True), True),
    "byte level, no BOS": (byte_level("smollm", False), False),
    "byte level, BOS by llama.cpp's default": (byte_level("llama-bpe", None), True),
    "byte level, no flag": (byte_level("smollm", None), False),
    "pieces, BOS": (sentence_pieces("llama", True), True),
    "pieces, no BOS": (sentence_pieces("llama", False), False),
    "pieces, no flag": (sentence_pieces("llama", None), True),
    "Gemma 3": (sentence_pieces("gemma3", True), True),
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_tokenizer_does_as_its_file_says(name: str, tmp_path: Path) -> None:
    (architecture, metadata), begins = VOCABULARIES[name]
    write_vocabulary(tmp_path / "m.gguf", architecture, metadata)
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    bos = fields["tokenizer.ggml.bos_token_id"].contents()
    if name == "Gemma 3" and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        with pytest.raises(UserError, match="reads its tokenizer wrongly: token 12 is '<0x09>' in the file"):
            load_tokenizer(tmp_path / "m.gguf")
        return
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    tokenizer.save_pretrained(tmp_path / "saved")
    for each in (tokenizer, transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")):
        ids = each("hello")["input_ids"]
        assert (ids[0] == bos) == begins
        # The one token that the merges, or the pieces, lead to; SentencePiece may put a space before it.
        assert [tokens[i] for i in ids[begins:]] in (["hello"], ["\u2581hello"]), [tokens[i] for i in ids]


def without_bos(tokenizer: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    # As of a class without the property, the flag changes nothing.
    type(tokenizer).add_bos_token = property(lambda self: True, lambda self, value: None)


def other_vocabulary(tokenizer: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {piece: i for i, piece in enumerate(["<|begin|>", "<|end|>", *sorted(alphabet())])}
    tokenizer.backend_tokenizer.model = tokenizers.models.BPE(vocabulary, [])


def other_merges(tokenizer: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    merges = [("l", "l"), ("h", "e"), ("he", "ll"), ("hell", "o"), ("\u0120", "w")]
    vocabulary = tokenizer.get_vocab()
    tokenizer.backend_tokenizer.model = tokenizers.models.BPE(vocabulary, merges)


def other_decoder(tokenizer: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer.backend_tokenizer.normalizer = tokenizers.normalizers.Lowercase()


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (other_vocabulary, r"token \d+ is .* in the file, and .* as it is read"),
        (other_merges, "merge 0 is 'h e' in the file, and 'l l' as it is read"),
        (without_bos, r"adds no BOS \(token 0\) to a text, against the file's add_bos_token"),
        (other_decoder, "after it was encoded and decoded"),
    ],
)
def test_a_version_of_transformers_that_reads_it_wrongly_is_refused_by_name(
    fault: Callable[[Any], None], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quant.models import huggingface

    architecture, metadata = byte_level("smollm", True)
    write_vocabulary(tmp_path / "m.gguf", architecture, metadata)
    right = huggingface.load_tokenizer

    def wrong(*arguments: Any, **options: Any) -> Any:
        tokenizer = right(*arguments, **options)
        tokenizer.__class__ = type("Faulty", (type(tokenizer),), {})
        fault(tokenizer)
        return tokenizer

    monkeypatch.setattr(huggingface, "load_tokenizer", wrong)
    with pytest.raises(UserError, match=problem) as raised:
        load_tokenizer(tmp_path / "m.gguf")
    assert f"transformers {transformers.__version__} reads its tokenizer wrongly" in str(raised.value)
    assert "install another version of transformers" in str(raised.value)
