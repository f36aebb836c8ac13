"""Sections for readers: predictions that changed most, a text before and after, and the commands that use the model."""

from __future__ import annotations

from quant.evaluation.examples import Examples
from quant.recipes.plan_check import first_problem
from quant.recipes.plan import Plan
from quant.report.report import Report
from quant.report.section import Section, number, short_name


def predictions(examples: Examples) -> Section | None:
    """Returns the predictions with the largest KL, in their context."""
    if not examples.predictions:
        return None
    several = len({each.text for each in examples.predictions}) > 1
    rows = []
    for i, each in enumerate(examples.predictions):
        source = (short_name(each.text),) if several else ()
        chances = (f"{each.before:.2%}", f"{each.after:.2%}")
        likeliest = (_visible(each.likeliest_before), _visible(each.likeliest_after))
        rows.append(
            (
                f"T{i}",
                (
                    f"…{_visible(each.context.lstrip(' '))}",
                    number(each.kl),
                    _visible(each.token),
                    *chances,
                    *likeliest,
                    *source,
                ),
            )
        )
    text = (
        "The next tokens whose prediction changed most, by KL. Before and after are the probabilities that the "
        "original and the quantized model give to the token that follows in the text."
    )
    head = ("context", "KL", "next token", "before", "after", "likeliest before", "likeliest after")
    return Section("Worst predictions", text, None, None, (*head, "text") if several else head, rows)


def continuation(examples: Examples) -> Section | None:
    """Returns a text that both models wrote."""
    if (written := examples.continuation) is None:
        return None
    same = written.before == written.after
    text = "Both models continue the beginning of the evaluation text by their likeliest tokens"
    text += ", and write the same." if same else "."
    rows = [("prompt", written.prompt), ("original", written.before), ("quantized", written.after)]
    cells = [(f"C{i}", (name, words)) for i, (name, words) in enumerate(rows)]
    return Section("Text before and after", text, None, None, ("model", "words"), cells)


def usage(report: Report, plan: Plan) -> Section | None:
    """Returns commands for the directory that the page lies in; None for a model that writes no text."""
    if report.kv_cache is None:
        return None
    rows = [("try it", 'quant generate . --prompt "The capital of France is"')]
    problem = first_problem(plan, "vllm")
    if problem is None:
        cache = " --kv-cache-dtype fp8" if plan.kv_cache is not None else ""
        rows.append(("serve", f"vllm serve .{cache}"))
    rows.append(("check the files", "quant verify ."))
    text = "Commands for the directory of this page."
    if problem is not None:
        text += f" vLLM does not serve this plan: {problem}."
    return Section("Use it", text, None, None, ("purpose", "command"), [(f"D{i}", row) for i, row in enumerate(rows)])


def _visible(text: str) -> str:
    """Returns a token whose line breaks, tabs and leading blanks can be seen: the token " the" is not "the"."""
    shown = text.replace("\n", "⏎").replace("\t", "⇥")
    blanks = len(shown) - len(shown.lstrip(" "))
    return "␣" * blanks + shown[blanks:] or "∅"
