"""`next_steps` says what to do after a run: how its loss compares with the usual one, and the commands that use it."""

from __future__ import annotations

import shlex
from pathlib import Path

from quant.calibration.texts.data_needs import solver_needs_data
from quant.evaluation.evaluation import loss_text
from quant.formats.format import get_format
from quant.models.configs import read_fields
from quant.recipes.plan import Plan
from quant.recipes.plan_check import first_problem
from quant.recipes.solver_names import parse_solver
from quant.report.report import Report

# KL in nats of the default solver on SmolLM2-135M, from docs/benchmarks.md: by the weight format where inputs are in
# 16 bit, else by the bits of both. Larger models lose less, so that a loss far above these is worth a second run for a
# model of any size.
_USUAL_KL_OF_WEIGHTS = {"nvfp4": 0.06}
_USUAL_KL = {(4, 4): 0.19, (4, 16): 0.11, (8, 8): 0.03, (8, 16): 0.03}
_LARGE = 2.0  # times the usual loss: texts of another kind lose up to that
_MORE_BITS = 0.5
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json")


def next_steps(report: Report, plan: Plan, directory: Path) -> list[str]:
    """Returns at most six lines for the terminal.

    Args:
        report: the report of the run.
        plan: the plan that was executed.
        directory: the checkpoint that the run wrote.
    """
    lines = [] if (verdict := _verdict(report, plan)) is None else [verdict]
    opened = f"report:   {shlex.quote(str(directory / 'report.html'))} in a browser"
    config = directory / "config.json"
    names = read_fields(config).get("architectures") or [""] if config.is_file() else [""]
    # The commands need text, and so a tokenizer: none for vision models, state dicts, or a model without its tokenizer.
    if not names[0].endswith("ForCausalLM") or not any((directory / name).is_file() for name in _TOKENIZERS):
        return [*lines, opened]
    if report.evaluation is None:
        lines.append("the loss was not measured: give --eval FILE to a run, or use the line `measure` below")
    path, original = shlex.quote(str(directory)), shlex.quote(report.model)
    lines.append(f'try it:   quant generate {path} --prompt "The capital of France is"')
    lines.append(f"measure:  quant evaluate {path} --text FILE --baseline {original}")
    if first_problem(plan, "vllm") is None:
        lines.append(f"serve:    vllm serve {path}")
    return [*lines, opened]


def _verdict(report: Report, plan: Plan) -> str | None:
    """Returns how the KL compares with the usual one of the formats; None where either is unknown."""
    worst = None if report.evaluation is None else report.evaluation.worst
    usual = [_usual_kl(layer.format, layer.activation) for layer in report.layers if layer.format is not None]
    if worst is None or worst.kl is None or not usual or None in usual:
        return None
    limit = max(kl for kl in usual if kl is not None)
    measured = f"KL {loss_text(worst.kl)}"
    if worst.interval is not None:
        measured += f" (95%: {loss_text(worst.interval[0])} to {loss_text(worst.interval[1])})"
    if worst.kl <= _LARGE * limit:
        size = "no more than" if worst.kl <= limit else "within twice"
        return f"{measured} is {size} the usual loss of these formats (about {limit:g} on a model of 135M)"
    advice = ", or ".join(_advice(plan))
    return f"{measured} is large for these formats (about {limit:g} is usual on a model of 135M): try {advice}"


def _usual_kl(weight: str, activation: str | None) -> float | None:
    inputs = 16 if activation is None else get_format(activation).element.bits
    if inputs == 16 and weight in _USUAL_KL_OF_WEIGHTS:
        return _USUAL_KL_OF_WEIGHTS[weight]
    return _USUAL_KL.get((get_format(weight).element.bits, inputs))


def _advice(plan: Plan) -> list[str]:
    """Returns options of `quantize` that lower the loss, the cheapest first."""
    options = []
    if not all(map(solver_needs_data, plan.quantized)):
        options.append("--effort 2, which rounds on calibration text")
    elif any(parse_solver(layer.solver).rounding != "kfac" for layer in plan.quantized):
        options.append("--effort 3, which rounds for the loss of the whole model")
    weights = {layer.weight for layer in plan.quantized if layer.activation and layer.activation.element.bits == 4}
    if weights:
        options.append(f"inputs in 16 bit ({' and '.join(sorted(f'{weight}a16' for weight in weights))})")
    else:
        options.append(f"--bits {plan.effective_bits + _MORE_BITS:.1f}, which gives sensitive layers a wider format")
    return options
