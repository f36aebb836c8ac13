"""`check_runtime` runs a checkpoint in an installed runtime and compares every layer of it with `quant.load`.

    runtime (a process of its own)  ─▶  some rows of x and y of each layer, log-probabilities, greedy tokens
    quant.load                      ─▶  y of the same x, log-probabilities, greedy tokens

A layer is computed from the runtime's own input, so that an error stays with the layer that makes it. A runtime may
leave inputs in 16 bit where the checkpoint rounds them (vLLM on Hopper does so with NVFP4): a layer is right if it
equals either, and the model is then compared with the inputs that the runtime took. Log-probabilities find what lies
between the layers: attention, the KV cache, norms, embeddings.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from quant.base.errors import UserError, known_names
from quant.base.json_files import JsonData, json_text
from quant.calibration.texts.mixture import sample_texts
from quant.evaluation.outputs import inputs_moved
from quant.export.checkpoint.load import describe, load
from quant.export.checkpoint.other_runtimes import unpacking_warnings
from quant.export.checkpoint.runtime_probe import PROBES, continue_greedily, score
from quant.generate.quantized_attention import quantized_attention
from quant.kernels.linear.quant_linear import QuantLinear
from quant.kernels.linear.quantized_module import QuantizedModule
from quant.models.huggingface import load_tokenizer

LAYER_LIMIT = 0.02
"""Largest relative error of a layer. Kernels in BF16 stay below 0.005; one wrong block in a hundred makes 0.1."""
ROUNDED_LIMIT = 0.06
"""The same for rounded inputs: a value near a tie may go either way. Inputs that are not rounded at all make 0.1."""
_EXPLAINS = 0.4
"""A runtime leaves inputs in 16 bit if that error is below this part of the error with rounded inputs: rounding to FP8
makes 0.025, and kernels in BF16 0.005. A value at a tie that both round, but not alike, makes half."""
LAYER_NOISE_MULTIPLE = 2.0
"""Where a layer with rounded inputs is over its limit, how often its own noise it may make: that of one rounding of its
inputs. A runtime rounds several times before it rounds to few bits."""
MODEL_LIMIT, NOISE_MULTIPLE = 0.2, 1.5
"""Largest mean difference of log-probabilities, in nat: the order of sums in BF16 already makes 0.04 on SmolLM2.

With inputs in NVFP4 it makes 0.65. So where the difference is larger, the noise of `quant.load` itself is measured, and
the limit is this multiple of it."""
TEXTS, TOKENS, NEW_TOKENS = 4, 96, 16


@dataclass(frozen=True)
class RuntimeLayer(JsonData):
    """One layer of the runtime."""

    name: str
    kernel: str  # the class that multiplied
    error: float | None  # of its output, relative to that of `quant.load`; None where that has no such layer
    inputs: str = "16 bit"  # or "rounded": the variant that it equals
    # The error that `quant.load` has if the rounded inputs move by one rounding; None if `error` is within its limit.
    noise: float | None = None

    @property
    def kind(self) -> str:
        """The last part of the name: "qkv_proj"."""
        return self.name.rpartition(".")[2]

    @property
    def is_wrong(self) -> bool:
        """Whether the output differs by more than the order of sums and ties of rounding explain; NaN is wrong too."""
        if self.error is None:
            return False
        limit = LAYER_LIMIT if self.inputs == "16 bit" else ROUNDED_LIMIT
        return not self.error <= max(limit, LAYER_NOISE_MULTIPLE * (self.noise or 0.0))


@dataclass(frozen=True)
class RuntimeCheck(JsonData):
    """A checkpoint in a runtime."""

    runtime: str  # name and version
    attention: str  # its class, and the dtype of the cache, as the runtime names them
    kv_cache: str
    layers: tuple[RuntimeLayer, ...]
    logprob_difference: float  # mean absolute difference, nat
    top_1: float  # share of positions at which both find the same token likeliest
    greedy: float  # share of greedily generated tokens that are equal, up to the first difference of each text
    # The difference between two runs of `quant.load` whose layers' inputs differ by one rounding; None if it is within
    # the limit without it.
    noise: float | None
    problems: tuple[str, ...]  # one line each; none if the runtime computes the model of the checkpoint


def check_runtime(
    directory: Path, runtime: str, *, engine: dict[str, Any] | None = None, trust_remote_code: bool = False
) -> RuntimeCheck:
    """Runs a checkpoint in `runtime`, with arguments `engine` of `vllm.LLM`, and compares.

    UserError if it does not load.
    """
    if runtime not in PROBES:
        raise UserError(f"no runtime {runtime!r}; {known_names(runtime, PROBES)}")
    config = json.loads((directory / "config.json").read_text())
    if runtime == "transformers":
        # It unpacks some weights to another dtype than the model's, and fails.
        dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"), torch.bfloat16)
        for message in unpacking_warnings(describe(directory)[0], dtype):
            raise UserError(f"{directory}: {message}")
    rows = _rows(directory, config)
    request = {
        "rows": rows.tolist(), "new_tokens": NEW_TOKENS, "engine": engine or {}, "trust_remote_code": trust_remote_code
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        facts, seen = _probe(runtime, directory, request, Path(folder))
    return _compare(load(directory, trust_remote_code=trust_remote_code), rows, facts, seen)


def _rows(directory: Path, config: dict[str, Any]) -> torch.Tensor:
    """Returns the token ids `[TEXTS, TOKENS]` of several kinds of texts, or drawn at random without a tokenizer."""
    vocabulary = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size", 256)
    if not (directory / "tokenizer.json").is_file():
        return torch.randint(vocabulary, (TEXTS, TOKENS), generator=torch.Generator().manual_seed(0), device="cpu")
    tokenizer = load_tokenizer(directory)
    texts = ["\n\n".join(sample_texts(name)) for name in ("prose", "code", "manual", "languages")]
    return torch.tensor([tokenizer(text).input_ids[:TOKENS] for text in texts], device="cpu")


def _probe(runtime: str, directory: Path, request: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Any]:
    """Returns the facts and tensors that `runtime_probe` has written."""
    (folder / "rows.json").write_text(json_text(request))
    command = [sys.executable, "-m", "quant.export.checkpoint.runtime_probe", runtime, str(directory)]
    done = subprocess.run(
        [*command, str(folder / "rows.json"), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if not (folder / "probe.json").is_file():
        # Servers print many lines after an error, and the first error is the cause of the others.
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        named = [line for line in lines if "Error: " in line or line.endswith("Error")]
        error = (named or lines[-1:] or ["it printed nothing"])[0][-300:]
        raise UserError(f"{directory}: {runtime} does not run it: {error}")
    return json.loads((folder / "probe.json").read_text()), load_file(folder / "probe.safetensors")


def _compare(
    model: nn.Module, rows: torch.Tensor, facts: dict[str, Any], seen: dict[str, torch.Tensor]
) -> RuntimeCheck:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device)
    modules = dict(model.named_modules())
    layers, members = [], {}
    for index, layer in enumerate(facts["layers"]):
        references = [_module(name, modules) for name in layer["members"]]
        compared = _layer(layer, references, seen[f"x.{index}"].to(device), seen[f"y.{index}"].to(device))
        layers.append(compared)
        members[layer["name"]] = [module for module in references if module is not None]
    # The model with the inputs that the runtime took.
    for layer in layers:
        if layer.inputs == "16 bit":
            for module in members[layer.name]:
                for child in _quantized(module):
                    child.activation_format = None
    plan = getattr(model, "quantization_plan", None)
    with torch.no_grad(), quantized_attention(model, **(plan.run_time if plan is not None else {})):
        ours = score(model, rows.to(device))
        greedy = continue_greedily(model, rows.to(device), seen["greedy"].shape[1])
        difference, noise = _difference(ours, seen), None
        if difference > MODEL_LIMIT and not any(layer.is_wrong for layer in layers):
            dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
            with inputs_moved(model, dtype):
                noise = _difference(ours, score(model, rows.to(device)))
    equal = (greedy == seen["greedy"]).long().cumprod(1).float().mean()
    top_1 = (ours["likeliest"] == seen["likeliest"]).float().mean()
    return RuntimeCheck(
        facts["runtime"], facts["attention"], facts["kv_cache"], tuple(layers), difference, float(top_1), float(equal),
        noise, tuple(_problems(layers, difference, noise or 0.0)),
    )  # fmt: skip


def _difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Returns the mean absolute difference of log-probabilities of two runs of `score`, in nat."""
    return float((one["logprobs"] - other["logprobs"]).abs().mean())


def _module(name: str, modules: dict[str, nn.Module]) -> nn.Module | None:
    """Returns our module for the runtime's name; models with several towers differ in what precedes `layers`."""
    if name in modules:
        return modules[name]
    tail = name[name.find("layers.") :] if "layers." in name else name.rpartition(".")[2]
    candidates = [module for other, module in modules.items() if other.endswith(f".{tail}") or other == tail]
    return candidates[0] if len(candidates) == 1 else None


def _layer(
    layer: dict[str, Any], references: Sequence[nn.Module | None], x: torch.Tensor, y: torch.Tensor
) -> RuntimeLayer:
    """Compares the runtime's `y` of `x` with ours, with rounded inputs and with inputs in 16 bit."""
    modules = [module for module in references if module is not None]
    if not modules or len(modules) < len(references):
        return RuntimeLayer(layer["name"], layer["kernel"], None)
    quantized = [child for module in modules for child in _quantized(module)]
    formats = [child.activation_format for child in quantized]
    errors = {} if not any(formats) else {"rounded": _error(_outputs(modules, x), y)}
    for child in quantized:
        child.activation_format = None
    errors["16 bit"] = _error(_outputs(modules, x), y)
    for child, format in zip(quantized, formats, strict=True):
        child.activation_format = format
    # Other roundings of the inputs can be as far from ours as no rounding at all: inputs were left in 16 bit only where
    # that explains the output.
    rounds = "rounded" in errors and errors["16 bit"] > _EXPLAINS * errors["rounded"]
    inputs, noise = "rounded" if rounds else "16 bit", None
    if rounds and errors[inputs] > ROUNDED_LIMIT:
        # The error of our own output if `x` moves by one rounding of the layers' dtype.
        ours = _outputs(modules, x)
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(inputs_moved(module, _dtype(module)))
            noise = _error(_outputs(modules, x), ours)
    return RuntimeLayer(layer["name"], layer["kernel"], errors[inputs], inputs, noise)


def _quantized(module: nn.Module) -> list[QuantizedModule]:
    return [child for child in module.modules() if isinstance(child, QuantizedModule)]


@torch.no_grad()
def _outputs(modules: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    """Returns the outputs side by side `[tokens, out]`, float32."""
    outputs = []
    for module in modules:
        if isinstance(module, QuantLinear) and module.activation_format is None:
            # In float64, without our kernels.
            bias = None if module.bias is None else module.bias.double()
            outputs.append(nn.functional.linear(x.double(), module.weight.double(), bias).float())
        else:
            # A block of experts takes [batch, tokens, hidden]; linear layers take that, too.
            y = module(x[None].to(_dtype(module)))
            outputs.append((y[0] if isinstance(y, tuple) else y).float().reshape(len(x), -1))
    return torch.cat(outputs, 1)


def _dtype(module: nn.Module) -> torch.dtype:
    """Returns the dtype of a module's inputs."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point() and p.dim() > 1), torch.bfloat16)


def _error(expected: torch.Tensor, y: torch.Tensor) -> float:
    y = y[:, : expected.shape[1]]  # a runtime pads the vocabulary of its head
    return float((y - expected).norm() / expected.norm().clamp(min=1e-30))


def _problems(layers: Sequence[RuntimeLayer], difference: float, noise: float) -> Iterator[str]:
    wrong: dict[str, list[RuntimeLayer]] = {}
    for layer in layers:
        if layer.is_wrong:
            wrong.setdefault(layer.kind, []).append(layer)
    for kind, some in wrong.items():
        worst = max(some, key=lambda layer: layer.error or 0.0)
        count = sum(layer.kind == kind for layer in layers)
        yield (
            f"{kind}: {len(some)} of {count} layers are wrong in {worst.kernel}, {worst.name} most: its output differs "
            f"by {worst.error:.1%}"
        )
    if not wrong and not difference <= max(MODEL_LIMIT, NOISE_MULTIPLE * noise):
        yield (
            f"attention, KV cache, norms or embeddings: every linear layer is right, and log-probabilities differ by "
            f"{difference:.2f} nat on average"
        )
