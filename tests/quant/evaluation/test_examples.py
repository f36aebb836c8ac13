"""Examples of a loss equal plain computations: brute force over all positions, transformers' own greedy decoding."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import tiny_models
import torch
from torch.nn import functional as F

from quant.calibration.evaluating import prepared
from quant.evaluation.evaluate import evaluate_texts
from quant.evaluation.evaluation import Examples, WorstPredictions, continuations, output_errors


@pytest.fixture(scope="module")
def base() -> Any:
    return tiny_models.llama()


@pytest.fixture(scope="module")
def changed(base: Any) -> Any:
    """The model with noise in the weights of its last block."""
    model = copy.deepcopy(base)
    generator = torch.Generator().manual_seed(3)
    for name in ("self_attn.v_proj", "mlp.down_proj"):
        weight = model.model.layers[-1].get_submodule(name).weight
        weight.data += 0.5 * weight.std() * torch.randn(weight.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def texts(base: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(3, base.config.vocab_size, (3, 20), generator=generator) for name in ("a", "b")}


def decode(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_worst_predictions_are_those_of_all_texts_and_positions(
    base: Any, changed: Any, texts: dict[str, torch.Tensor], batch_size: int
) -> None:
    worst = WorstPredictions(5, decode)
    evaluate_texts(changed, texts, base, worst=worst, batch_size=batch_size)
    expected = []
    for name, rows in texts.items():
        with torch.no_grad():
            before, after = (model(rows).logits.double().log_softmax(-1) for model in (base, changed))
        kl = F.kl_div(after, before, log_target=True, reduction="none").sum(-1)
        for row, position in ((r, p) for r in range(len(rows)) for p in range(rows.shape[1] - 1)):
            token = int(rows[row, position + 1])
            chances = [float(logp[row, position, token].exp()) for logp in (before, after)]
            likeliest = [str(int(logp[row, position].argmax())) for logp in (before, after)]
            context = decode(rows[row, : position + 1].tolist())
            expected.append((float(kl[row, position]), name, context, str(token), *chances, *likeliest))
    expected.sort(key=lambda each: -each[0])
    shown = worst.of_all_ranks()
    assert len(shown) == 5
    for each, (kl, name, context, token, before, after, *likeliest) in zip(shown, expected, strict=False):
        assert each.kl == pytest.approx(kl, rel=1e-3)
        assert (each.text, each.context, each.token) == (name, context, token)
        assert (each.before, each.after) == (pytest.approx(before, rel=1e-3), pytest.approx(after, rel=1e-3))
        assert [each.likeliest_before, each.likeliest_after] == likeliest
    examples = Examples(shown, None)
    assert Examples.from_dict(examples.to_dict()) == examples


def test_output_errors_are_those_of_the_layers_in_the_model(
    base: Any, changed: Any, texts: dict[str, torch.Tensor]
) -> None:
    row = texts["a"][0]
    names = [name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)]
    with torch.no_grad():
        errors = output_errors(changed, base, row, [*names, "model.layers.0.mlp.experts"])
        outputs: list[torch.Tensor] = []
        for model in (base, changed):
            module = model.model.layers[-1].mlp.down_proj
            with_hook = module.register_forward_hook(lambda m, a, out: outputs.append(out.double()))
            model(row[None])
            with_hook.remove()
    last = f"model.layers.{len(base.model.layers) - 1}"
    plain = float((outputs[1] - outputs[0]).norm() / outputs[0].norm())
    assert plain > 0.1 and errors[f"{last}.mlp.down_proj"] == pytest.approx(plain, rel=1e-5)
    # Layers before the change have no error, and one behind it has that of its inputs.
    exact = {f"{last}.self_attn.{name}_proj" for name in "qk"} | {name for name in names if "layers.0" in name}
    assert errors.keys() == set(names) and {name for name in names if errors[name] == 0} == exact
    assert errors[f"{last}.mlp.up_proj"] > 0 and errors["lm_head"] > 0


def test_continuations_are_the_greedy_ones_of_transformers(
    base: Any, changed: Any, texts: dict[str, torch.Tensor]
) -> None:
    prompt = texts["b"][0, :6].tolist()
    with torch.no_grad(), prepared([base, changed], torch.float32):
        written = continuations(changed, base, prompt, decode, tokens=7)
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=7, min_new_tokens=7, do_sample=False)[0, 6:].tolist()
        for model in (base, changed)
    ]
    assert [written.prompt, written.before, written.after] == [decode(prompt), *map(decode, expected)]
    assert written.before != written.after
