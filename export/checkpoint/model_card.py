"""`write_card` writes README.md, the model card of a checkpoint: its base, formats, measured loss and use.

The Hugging Face hub shows README.md and reads its front matter, so the source's card would present the quantized model
as the original. The checkpoint gets a card of its own; the source's stays, byte for byte, as README.source.md.
Licence, language, tags and task are carried over from the source's front matter.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from quant.base.atomic import write_atomically
from quant.base.errors import loss_text
from quant.base.extras import require
from quant.base.json_files import json_text
from quant.export.checkpoint.files.directory import saved_report
from quant.export.checkpoint.other_runtimes import Trial, vllm_problem
from quant.formats.format import FORMATS
from quant.models.files import hub_name
from quant.recipes.plan import Plan, bits_per_weight
from quant.recipes.plan_check import first_problem

CARD, SOURCE_CARD = "README.md", "README.source.md"
_MARK = "<!-- Model card by Blockscale; a card without this line is never replaced. -->"
_TITLE = re.compile(f"{re.escape(_MARK)}\\s+# (.+), quantized\n")
_CARRIED = ("license", "license_name", "license_link", "language", "library_name", "pipeline_tag")
_LAYOUTS = {"compressed-tensors", "modelopt"}
_GENERATIVE = ("ForCausalLM", "ForConditionalGeneration")


def write_card(
    directory: Path,
    plan: Plan,
    model: nn.Module,
    *,
    source: Path | None,
    layout: str = "compressed-tensors",
    measured: Path | None = None,
    trial: Trial | None = None,
) -> None:
    """Writes the card of a checkpoint, whose other files are there; a card of the source in it is renamed.

    `source` is the directory of the original model, if known, `layout` a key of `LAYOUTS`, and `measured` the directory
    with the report that has the measured loss, by default `directory`. `trial` is that of transformers: the card
    recommends what was tried, and has the reason where it failed.
    """
    card = directory / CARD
    fields: dict[str, Any] = {}
    title = type(model).__name__ if source is None else source.name
    if card.is_file():
        text = card.read_text(encoding="utf-8", errors="replace")
        fields = _front_matter(text)
        # Our own card, of a checkpoint that was trained or converted, is outdated, and names the original model.
        if (own := _TITLE.search(text)) is not None:
            title = own[1]
        else:
            fields.pop("base_model", None)  # of the source itself; the checkpoint's base is the source
            card.replace(directory / SOURCE_CARD)
    base = fields.get("base_model") or (None if source is None else hub_name(source))
    title = base or title
    lines = [
        *_head(fields, plan, base, layout), _MARK, "", f"# {title}, quantized", "",
        *_formats(plan, title), *_loss(saved_report(measured or directory)), *_use(plan, model, layout, trial),
    ]  # fmt: skip
    write_atomically(card, "\n".join(lines) + "\n")


def is_own_card(file: Path) -> bool:
    """Returns whether a file is a card that `write_card` wrote, and may replace."""
    return file.is_file() and _MARK in file.read_text(encoding="utf-8", errors="replace")


def _front_matter(text: str) -> dict[str, Any]:
    """Returns the fields between the lines `---` at the start of a card; none where there are none that YAML reads."""
    if not text.startswith("---\n") or "\n---" not in text[3:]:
        return {}
    yaml = require("yaml", "hf")
    try:
        fields = yaml.safe_load(text[4 : text.index("\n---", 3)])
    except yaml.YAMLError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _head(fields: Mapping[str, Any], plan: Plan, base: Any, layout: str) -> Iterator[str]:
    """Yields the front matter. JSON is YAML too, and quotes whatever a source's card may hold."""
    head: dict[str, Any] = {}
    if base is not None:
        head = {"base_model": base, "base_model_relation": "quantized"}
    head |= {"library_name": "transformers", **{key: fields[key] for key in _CARRIED if fields.get(key)}}
    tags = fields.get("tags")
    formats = (layer.weight.name for layer in plan.quantized if layer.weight is not None)
    # Fields of our earlier card are written anew: the layout or the formats may be others.
    ours = {"blockscale", *_LAYOUTS, *FORMATS}
    carried = (tag for tag in map(str, tags if isinstance(tags, list) else ()) if tag not in ours)
    head["tags"] = list(dict.fromkeys([*carried, "blockscale", layout, *formats]))
    yield "---"
    if base is None:
        yield "# base_model: ORG/NAME, to be filled in: a local directory has no name on the hub"
    for key, value in head.items():
        yield f"{key}: {json_text(value, ensure_ascii=False, default=str)}"
    yield "---"


def _formats(plan: Plan, title: Any) -> Iterator[str]:
    link = f"[{title}](https://huggingface.co/{title})" if "/" in str(title) else str(title)
    yield (
        f"{link}, quantized to {plan.effective_bits:.3f} bits per quantized weight, scales counted, and written by "
        "Blockscale. `plan.json` has the format of every layer and the reason for it."
    )
    yield from ("", "| weights and inputs | layers | bits per weight |", "|---|---:|---:|")
    by_format: dict[str, list[Any]] = {}
    for layer in plan.layers:
        by_format.setdefault(layer.formats, []).append(layer)
    for name, layers in by_format.items():
        yield f"| {name} | {len(layers)} | {bits_per_weight(layers):.3f} |"
    for name, format in (("KV cache", plan.kv_text), ("attention", plan.attention)):
        if format:
            yield from ("", f"The {name} is in {format}.")


def _loss(report: Mapping[str, Any] | None) -> Iterator[str]:
    evaluation = (report or {}).get("evaluation")
    if not evaluation:
        return
    yield from ("", "## Measured loss", "", "Compared with the model before:", "")
    yield from ("| text | KL (nats) | same likeliest token | perplexity | before |", "|---|---:|---:|---:|---:|")
    for each in (evaluation, *(evaluation.get("others") or ())):
        cells = [
            "–" if (value := each.get(key)) is None else text(value)
            for key, text in (
                ("kl", loss_text), ("top1", "{:.1%}".format), ("perplexity", "{:.2f}".format),
                ("baseline_perplexity", "{:.2f}".format),
            )
        ]  # fmt: skip
        # Only the name: a path would disclose details of the machine.
        yield f"| {Path(str(each.get('text') or 'text')).name.replace('|', '/')} | {' | '.join(cells)} |"


def _use(plan: Plan, model: nn.Module, layout: str, trial: Trial | None) -> Iterator[str]:
    yield from ("", "## Use", "", "`DIR` is this directory. Blockscale checks and loads it:", "")
    kind = type(model)
    # A class with Python files of its own, which go along.
    own_code = getattr(kind, "_auto_class", None) is not None
    flag, argument = (" --trust-remote-code", ", trust_remote_code=True") if own_code else ("", "")
    yield from ("```console", f"$ quant check DIR{flag}", "```", "", "```python")
    yield from ("import quant", "", f'model = quant.load("DIR"{argument})', "```")
    if trial is not None and kind.__module__.startswith("transformers."):
        problem = trial.problem or first_problem(plan, "transformers")
        if problem is None:
            yield from ("", "transformers loads it with the package compressed-tensors, which unpacks the weights:", "")
            yield from ("```python", f"from transformers import {kind.__name__}", "")
            yield from (f'model = {kind.__name__}.from_pretrained("DIR")', "```")
        else:
            yield from ("", f"Not with transformers alone: {problem}.")
    if kind.__name__.endswith(_GENERATIVE):
        problem = vllm_problem(plan, model, layout)
        if problem is None:
            yield from ("", "vLLM has kernels for these formats:", "", "```console", f"$ vllm serve DIR{flag}", "```")
        else:
            yield from ("", f"{problem}.")
