"""`quant generate` gives the greedy tokens of the same model with plain weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from samples import BASE
from torch import nn

from quant.base.errors import UserError
from quant.cli.main import main
from quant.cli.quantize import quantize_command
from quant.export.checkpoint.load import load
from quant.generate.generate import cast_unquantized, generate
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.blocks import cache_argument, cache_of

transformers = pytest.importorskip("transformers")

PROMPT = "12 200 45 7 99"


def run(command: Any, *arguments: object) -> Any:
    return CliRunner().invoke(command, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("generation") / "nvfp4"
    result = run(quantize_command, BASE, "--format", "nvfp4a16", "--out", out, "--quiet")
    assert result.exit_code == 0, result.output
    return out


def dequantized(directory: Path) -> nn.Module:
    """The checkpoint with `nn.Linear` in place of every quantized linear."""
    model = load(directory)
    dtype = next(model.parameters()).dtype
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantLinear):
            plain = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, dtype=dtype)
            plain.weight = nn.Parameter(module.dequantize(dtype))
            if module.bias is not None:
                plain.bias = module.bias
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, plain)
    return model.eval()


def greedy(model: nn.Module, ids: list[int], count: int, end: int) -> list[int]:
    """The likeliest token each time, by logits in float32, with transformers' cache but without its generate()."""
    out: list[int] = []
    step, cache = torch.tensor([ids]), None
    with torch.no_grad():
        while len(out) < count and (not out or out[-1] != end):
            result = model.model(step, **cache_argument(model, cache), use_cache=True)
            cache = cache_of(result)
            logits = model.lm_head.weight.float() @ result.last_hidden_state[0, -1].float()
            out.append(int(logits.argmax()))
            step = torch.tensor([out[-1:]])
    return out


@pytest.mark.gpu
def test_kernels_choose_tokens_that_the_dequantized_model_likes_best(checkpoint: Path) -> None:
    """Sums in another order may break a tie of this random model the other way, and nothing else."""
    result = run(main, "generate", checkpoint, "--prompt", PROMPT, "--max-new-tokens", 24, "--json", "--device", "cuda")
    assert result.exit_code == 0, result.output
    written = json.loads(result.stdout)
    assert (written["device"], written["kernels"]) == ("cuda:0", "Triton")
    ids = written["prompt_tokens"] + written["tokens"]
    with torch.no_grad():
        logits = dequantized(checkpoint).float()(torch.tensor([ids])).logits[0, len(written["prompt_tokens"]) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(written["tokens"])[:, None])[:, 0]
    assert bool((logits.amax(1) - chosen <= 0.03 * logits.std(1)).all())


def test_greedy_tokens_are_those_of_the_dequantized_model(checkpoint: Path) -> None:
    result = run(main, "generate", checkpoint, "--prompt", PROMPT, "--max-new-tokens", 24, "--json", "--device", "cpu")
    assert result.exit_code == 0, result.output
    written = json.loads(result.stdout)
    model = dequantized(checkpoint)
    expected = greedy(model, written["prompt_tokens"], 24, model.config.eos_token_id)
    assert written["tokens"] == expected and len(expected) > 4
    assert len(set(expected)) > 1
    assert written["device"] == "cpu"
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    assert written["text"] == tokenizer.decode(expected, skip_special_tokens=True)


def test_the_dtype_is_that_of_everything_but_codes_scales_and_frequencies(checkpoint: Path) -> None:
    """The tokens are those of the dequantized model in that dtype; a position's angle needs float32 in any."""
    frequencies = load(checkpoint).model.rotary_emb.inv_freq
    for name in ("float32", "float16"):
        arguments = ("--prompt", PROMPT, "--max-new-tokens", 12, "--json", "--device", "cpu", "--dtype", name)
        result = run(main, "generate", checkpoint, *arguments)
        assert result.exit_code == 0, result.output
        written = json.loads(result.stdout)
        model = dequantized(checkpoint).to(getattr(torch, name))
        model.model.rotary_emb.inv_freq = frequencies
        assert written["tokens"] == greedy(model, written["prompt_tokens"], 12, model.config.eos_token_id)
        cast = load(checkpoint)
        cast_unquantized(cast, name)
        assert {p.dtype for p in cast.parameters()} == {getattr(torch, name)}
        assert torch.equal(cast.model.rotary_emb.inv_freq, frequencies)
        for before, after in zip(load(checkpoint).modules(), cast.modules(), strict=True):
            if isinstance(before, QuantLinear):
                assert torch.equal(before.dequantize(), after.dequantize())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_logits_that_bf16_makes_equal_are_told_apart(device: str) -> None:
    """The first row of the head is that of the likeliest token but for one entry, which costs it a little."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(BASE)
    model = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.bfloat16)
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state[0, -1].float()
        head = nn.Linear(*reversed(model.lm_head.weight.shape), bias=False, dtype=torch.bfloat16)
        head.weight.copy_(model.lm_head.weight)
        likeliest = int((head.weight.float() @ hidden).argmax())
        assert likeliest > 0
        place = int(hidden.abs().argmax())
        head.weight[0] = head.weight[likeliest]
        head.weight[0, place] -= 0.001 / hidden[place]
        margin = float((head.weight[likeliest] - head.weight[0]).float() @ hidden)
        assert 0.0003 < margin < 0.0017
        model.lm_head = head
        narrow = model(ids).logits[0, -1]
        assert narrow[0] == narrow[likeliest] and int(narrow.argmax()) == 0
    written = generate(model, tokenizer, PROMPT, 1, device=device)
    assert written.tokens == (likeliest,)
    assert "forward" not in vars(model.lm_head)


def test_a_model_that_is_not_quantized_writes_too(checkpoint: Path) -> None:
    result = run(main, "generate", BASE, "--prompt", PROMPT, "--max-new-tokens", 5, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(PROMPT)
    assert "5 tokens in" in result.stderr and "PyTorch reference" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", PROMPT, "--max-new-tokens", "0"), "--max-new-tokens is 0; expected 1 or more"),
        (("--prompt", PROMPT, "--max-new-tokens", "500"), "the model takes 128; shorten the prompt"),
        (("--prompt", PROMPT, "--dtype", "int8"), "--dtype int8: unknown; known: bfloat16, float16, float32"),
        (("--prompt", PROMPT, "--device", "teapot"), "device teapot is not a device"),
        (("--prompt", PROMPT, "--device", "cuda:63"), "device cuda:63: PyTorch sees"),
    ],
)
def test_mistakes_are_one_line(checkpoint: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run(main, "generate", checkpoint, *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_a_prompt_without_a_token(checkpoint: Path) -> None:
    """In Python; the command says that the variable was empty."""
    transformers = pytest.importorskip("transformers", reason="the extra hf")
    with pytest.raises(UserError, match="the prompt holds no token; give some text with"):
        generate(load(checkpoint), transformers.AutoTokenizer.from_pretrained(checkpoint), "", 1)
    told = run(main, "generate", checkpoint, "--prompt", "")
    assert told.exit_code == 2 and "'--prompt' is empty, as a variable that is not set" in told.stderr


def test_tune_needs_a_gpu_or_says_so(checkpoint: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = run(main, "tune", checkpoint)
    assert result.exit_code == 2 and "there is no GPU cuda:0" in result.stderr
