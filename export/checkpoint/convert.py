"""`convert` writes a checkpoint in another layout, tensor by tensor, without a model in memory.

`write_card` writes README.md, the model card of a checkpoint: its base, formats, measured loss and use.

The Hugging Face hub shows README.md and reads its front matter, so the source's card would present the quantized model
as the original. The checkpoint gets a card of its own; the source's stays, byte for byte, as README.source.md.
Licence, language, tags and task are carried over from the source's front matter.
"""

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quant.base.atomic import write_atomically
from quant.base.errors import UserError, known_names, loss_text, require
from quant.base.json_files import json_text, text_as_in_source
from quant.base.torch_modes import in_own_modes
from quant.export.checkpoint import open_checkpoint
from quant.export.checkpoint.files import modelopt
from quant.export.checkpoint.files.directory import check_apart, new_directory, saved_report
from quant.export.checkpoint.files.layout import COMPRESSED_TENSORS, Layout
from quant.export.checkpoint.files.layouts import LAYOUTS
from quant.export.checkpoint.files.tensor_file import CHECKSUMS, write_checksums
from quant.export.checkpoint.files.tensors import (
    SECOND_LEVEL,
    clear_flag,
    layer_tensor_names,
    layer_weights,
    read_layer,
    read_parts,
    write_tensors,
)
from quant.export.checkpoint.other_runtimes import Trial, runtime_warnings, trial_load, vllm_problem
from quant.formats.format import FORMATS
from quant.models.files import copy_along, hub_name
from quant.models.huggingface import remote_code
from quant.recipes.blocks import stored_dtype
from quant.recipes.plan import PLAN_FILE, Plan, bits_per_weight
from quant.recipes.plan_check import first_problem, fusion_warnings

# Not copied: config files are written anew, and a report and checksums are of the old files.
_NOT_COPIED = (
    "config.json", "model.safetensors.index.json", CHECKSUMS, PLAN_FILE, "receipt.json", "report.html", "report.json",
    modelopt.CONFIG_FILE,
)  # fmt: skip


@in_own_modes
def convert(
    directory: str | Path, out: str | Path, to: str, *, overwrite: bool = False, model: nn.Module | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Writes the checkpoint `directory` in the layout `to`: the same codes and scales, bit for bit, and its plan.

    The tensors are mapped from the files, so that only the shard that is being written is in memory.

    Args:
        directory: a checkpoint of either layout, with a config.json.
        out: appears when everything in it is written, and not before.
        to: "modelopt" or "compressed-tensors".
        overwrite: replaces a checkpoint at `out`.
        model: the checkpoint's `outline`, of a caller that has it.
        trust_remote_code: lets transformers run the Python files that config.json names in `auto_map`.

    Returns:
        `files`, sizes by name; `rounded_scales`, how many global scales float32 does not hold in this layout.
        Runtimes read the nearest float32, at most 6e-8 of the scale away. The files' metadata keeps the exact scale for
        `load` and for a conversion back.

    Raises:
        UserError: an unknown layout, or no config.json.
        FileExistsError: `out` is, holds or lies in `directory`.
        ValueError: the layout has no name for something in the plan; the message names the layer and the way out.
    """
    directory, out = Path(directory).expanduser(), Path(out).expanduser()
    if to not in LAYOUTS:
        raise UserError(f"no layout {to!r}; {known_names(to, LAYOUTS)}")
    # The source stays mapped while `out` is written; a directory inside the other would be read and replaced at once.
    check_apart(out, directory)
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory}: no config.json, and so one for quant.load(directory, model), in its own layout")
    with remote_code(trust_remote_code):
        opened = open_checkpoint.Checkpoint(directory, model or open_checkpoint.outline(directory))
    plan, names, dtype = opened.plan, opened.names, stored_dtype(opened.model)
    layout = LAYOUTS[to]
    # Before any tensor is read: a plan that the layout cannot express is refused at once, not after most shards.
    layout.check_plan(plan)
    tensors = dict(_converted(opened, dtype, layout))
    # A float64 scale is one that float32 does not hold (`write_tensors`).
    rounded = sum(t.dtype is torch.float64 and n.endswith(SECOND_LEVEL) for n, t in tensors.items())
    messages = [*fusion_warnings(plan), *runtime_warnings(plan, dtype, names, tensors, to)]
    with new_directory(out, overwrite=overwrite) as temporary:
        hashes = write_tensors(temporary, tensors, carried=names.carried, heads=opened.heads)
        for source in directory.iterdir():
            # Tokenizer, processor, remote code and licence go along.
            if source.name.startswith(".") or source.suffix == ".safetensors" or source.name in _NOT_COPIED:
                continue
            copy_along(source, temporary / source.name, directory)
        plan.save(temporary / PLAN_FILE)
        _write_configs(temporary, directory, opened, layout)
        trial = None
        if to == COMPRESSED_TENSORS:
            # As in `save`, tensors that transformers ignores are not compared.
            heads, carried = opened.heads, names.carried
            own = {n: t for n, t in tensors.items() if n not in carried and n.rpartition(".")[0] not in heads}
            trial = trial_load(temporary, opened.model, plan, own, names, allow_missing=True)
            messages = messages if trial is None else trial.heeded(temporary, messages)
        write_checksums(temporary, hashes, PLAN_FILE, "config.json")
        # The card of another tool goes along as it is.
        if is_own_card(temporary / CARD):
            write_card(temporary, plan, opened.model, source=None, layout=to, measured=directory, trial=trial)
        sizes = {file.name: file.stat().st_size for file in sorted(temporary.iterdir()) if file.is_file()}
    for message in messages:
        warnings.warn(message, stacklevel=2)
    return {"files": sizes, "rounded_scales": rounded}


def _write_configs(temporary: Path, directory: Path, opened: open_checkpoint.Checkpoint, layout: Layout) -> None:
    """Writes config.json as the checkpoint has it, with the quantization of `layout`, and the layout's own files."""
    # The bare word Infinity, which is not JSON, stays where a config has it: its readers know it.
    fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    clear_flag(fields, opened.model, open_checkpoint.untied_in(opened, opened.plan).values())
    fields["quantization_config"] = layout.quantization_config(opened.plan, opened.names)
    for file, contents in layout.own_files(opened.plan, opened.names).items():
        text = json.dumps(contents, indent=4, allow_nan=False)
        (temporary / file).write_text(text + "\n", encoding="utf-8")
    text = text_as_in_source(fields, indent=2, ensure_ascii=False)
    (temporary / "config.json").write_text(text + "\n", encoding="utf-8")


def _converted(opened: open_checkpoint.Checkpoint, dtype: torch.dtype, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    tensors, names = opened.tensors, opened.names
    owned: set[str] = set()
    # Codes and scales go through our own form, `BlockScaledTensor`, which both layouts read and write without rounding.
    for layer in opened.plan.quantized:
        owned.update(layer_tensor_names(tensors, layer))
        weight, input_scale = read_layer(tensors, layer)
        read_parts(tensors, layer)
        for matrix_name, matrix in layer_weights(layer.name, weight).items():
            for suffix, tensor in layout.compress(matrix, input_scale, dtype, layer.activation).items():
                yield names.stored(f"{matrix_name}.{suffix}"), tensor.contiguous()
    unquantized = {name: tensors[name] for name in tensors if name not in owned}
    open_checkpoint.refuse(open_checkpoint.kv_scale_problems(tensors))
    open_checkpoint.refuse(open_checkpoint.dtype_problems(opened.model, unquantized, tensors))
    open_checkpoint.refuse(open_checkpoint.suspect_problems(opened.model, tensors))
    for name in unquantized:
        # Only scales of the KV cache differ between layouts in both name and form: ModelOpt has `k_proj.k_scale` and
        # one number, compressed-tensors `k_scale` and one number or one for each head.
        if name.endswith(open_checkpoint.KV_SCALES):
            try:
                stored = layout.stored_kv_scale(names.stored(name), tensors[name], dtype)
            except ValueError as error:
                raise UserError(str(error)) from None
            yield stored
        else:
            yield names.stored(name), tensors[name]


CARD, SOURCE_CARD = "README.md", "README.source.md"
_MARK = "<!-- Model card by Blockscale; a card without this line is never replaced. -->"
_TITLE = re.compile(f"{re.escape(_MARK)}\\s+# (.+), quantized\n")
_CARRIED = ("license", "license_name", "license_link", "language", "library_name", "pipeline_tag")
_LAYOUTS = {"compressed-tensors", "modelopt"}
_GENERATIVE = ("ForCausalLM", "ForConditionalGeneration")


def write_card(
    directory: Path, plan: Plan, model: nn.Module, *, source: Path | None, layout: str = "compressed-tensors",
    measured: Path | None = None, trial: Trial | None = None,
) -> None:  # fmt: skip
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
                ("kl", loss_text),
                ("top1", "{:.1%}".format),
                ("perplexity", "{:.2f}".format),
                ("baseline_perplexity", "{:.2f}".format),
            )
        ]
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
