"""`check_runtime` runs a checkpoint in an installed runtime and compares every layer of it with `quant.load`.

    runtime (a process of its own)  ─▶  some rows of x and y of each layer, log-probabilities, greedy tokens
    quant.load                      ─▶  y of the same x, log-probabilities, greedy tokens

A layer is computed from the runtime's own input, so that an error stays with the layer that makes it. A runtime may
leave inputs in 16 bit where the checkpoint rounds them (vLLM on Hopper does so with NVFP4): a layer is right if it
equals either, and the model is then compared with the inputs that the runtime took. Log-probabilities find what lies
between the layers: attention, the KV cache, norms, embeddings.

The runtime has a process of its own, because it takes the GPU's memory, and settings that hold for the whole process:

    python -m quant.export.checkpoint.runtime_check vllm DIR ROWS.json OUT

    OUT/probe.json          versions, and name, members and kernel of each layer
    OUT/probe.safetensors   x.i and y.i: some rows of the input and the output of layer i, at its first call
                            logprobs [rows, tokens - 1], likeliest [rows, tokens - 1], greedy [rows, new]

vLLM merges layers: `qkv_proj` has the members `q_proj`, `k_proj` and `v_proj`, whose outputs stand side by side. A
block of experts is noted as a whole, its router included.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quant.base.errors import UserError, known_names
from quant.base.json_files import JsonData, json_text
from quant.calibration.texts.mixture import sample_texts
from quant.evaluation.evaluate import inputs_moved
from quant.export.checkpoint.load import describe, load
from quant.export.checkpoint.other_runtimes import unpacking_warnings
from quant.generate.quantized_attention import quantized_attention
from quant.kernels.linear.quant_linear import QuantLinear
from quant.kernels.linear.quantized_module import QuantizedModule
from quant.models.huggingface import load_tokenizer
from quant.vllm_plugin.register import register

ROWS = 8
"""Rows of its input and output that are noted of a layer."""
KERNEL_NAMES = ("kernel", "linear_kernel", "fp8_linear", "w8a8_block_fp8_linear", "experts_cls")
"""Names under which vLLM's methods and schemes hold the class or the object that multiplies."""


class Notes:
    """Observations of each layer, by name; a layer's first call counts, once `is_open`."""

    def __init__(self) -> None:
        self.is_open = False
        self.layers: dict[str, dict[str, Any]] = {}
        self.tensors: dict[str, Tensor] = {}

    def add(self, name: str, members: list[str], kernel: str, x: Tensor, y: Tensor) -> None:
        """Notes the first rows of an input `[…, in]` and its output `[…, out]`."""
        if not self.is_open or name in self.layers:
            return
        index = len(self.layers)
        self.layers[name] = {"name": name, "members": members, "kernel": kernel}
        for key, value in (("x", x), ("y", y)):
            rows = value.detach().reshape(-1, value.shape[-1])[:ROWS]
            # A copy: layers such as q, k and v share their input, and a file holds no tensor twice.
            self.tensors[f"{key}.{index}"] = rows.to("cpu", torch.float32, copy=True)

    def save(self, out: Path, **facts: Any) -> None:
        """Writes both files."""
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, out / "probe.safetensors")
        (out / "probe.json").write_text(json_text({**facts, "layers": list(self.layers.values())}), encoding="utf-8")


def kernel_name(module: nn.Module) -> str:
    """Returns the class that multiplies in a layer of vLLM: "MarlinNvFp4", "BlockscaleNvFp4", "16 bit"."""
    method, scheme = getattr(module, "quant_method", None), getattr(module, "scheme", None)
    owners = [owner for owner in (scheme, method) if owner is not None]
    kernel = next((k for key in KERNEL_NAMES for owner in owners if (k := getattr(owner, key, None)) is not None), None)
    if kernel is None:
        return "16 bit" if method is None or type(method).__name__.startswith("Unquantized") else type(method).__name__
    name = kernel.__name__ if isinstance(kernel, type) else type(kernel).__name__
    if name.startswith("Blockscale") and getattr(module, "blockscale_format", None) == "":
        name = name.replace("Blockscale", "Marlin")  # this layer exceeds a limit of our kernels
    return name.replace("LinearKernel", "").replace("ScaledMM", "")


def watch_vllm(model: nn.Module, notes: Notes) -> None:
    """Notes what vLLM's linear layers, its output head and its blocks of experts compute."""
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    for name, module in model.named_modules():
        if hasattr(module, "experts") and hasattr(module, "gate"):
            kernels = {kernel_name(child) for child in module.experts.modules() if hasattr(child, "quant_method")}
            module.register_forward_hook(_block_hook(notes, name, ", ".join(sorted(kernels - {"16 bit"})) or "16 bit"))
            continue
        method = getattr(module, "quant_method", None)
        is_linear = hasattr(module, "input_size_per_partition") or type(module).__name__ == "ParallelLMHead"
        if method is None or not is_linear:
            continue
        parent, _, last = name.rpartition(".")
        members = [f"{parent}.{member}" if parent else member for member in packed.get(last, [last])]
        # Layers may share a method, which is wrapped once and distinguishes them by their identity.
        layers: dict[int, tuple[str, list[str]]] = vars(method).setdefault("layers_noted", {})
        if not layers:
            method.apply = _noted(method.apply, notes, layers)
        layers[id(module)] = name, members


def _noted(apply: Callable[..., Any], notes: Notes, names: dict[int, tuple[str, list[str]]]) -> Callable[..., Any]:
    """Returns `apply(layer, x, bias)` of a method of vLLM, noted for the layers in `names`."""

    def noted(layer: nn.Module, x: Tensor, *arguments: Any, **named: Any) -> Any:
        # A kernel may use its input as a workspace, so the rows are copied before.
        before = x.detach().reshape(-1, x.shape[-1])[:ROWS].clone() if notes.is_open else x
        y = apply(layer, x, *arguments, **named)
        if id(layer) in names and isinstance(y, Tensor):
            name, members = names[id(layer)]
            notes.add(name, members, kernel_name(layer), before, y)
        return y

    return noted


def _block_hook(notes: Notes, name: str, kernel: str) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        y = output[0] if isinstance(output, tuple) else output
        if inputs and isinstance(y, Tensor):
            notes.add(name, [name], kernel, inputs[0], y)

    return hook


def probe_vllm(directory: Path, request: Mapping[str, Any], out: Path) -> None:
    """Runs the rows of `request` in vLLM, with our plug-in unless the environment switches it off."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, so that its layers can be read
    import vllm

    register()  # once more, because a checkout that is not installed has no entry points
    rows, new = request["rows"], request["new_tokens"]
    settings = {
        # No compiled graphs: every layer is called as it is. A second row must not find the first in a cache.
        "enforce_eager": True, "enable_prefix_caching": False, "skip_tokenizer_init": True, "seed": 0,
        "max_model_len": len(rows[0]) + new + 1, "max_num_seqs": len(rows), "disable_log_stats": True,
        "trust_remote_code": request["trust_remote_code"],
    }  # fmt: skip
    llm = vllm.LLM(model=str(directory), **{**settings, **request["engine"]})
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    notes = Notes()
    watch_vllm(model, notes)

    def generate(prompts: list[list[int]], **options: Any) -> list[Any]:
        ask = vllm.SamplingParams(temperature=0, detokenize=False, ignore_eos=True, **options)
        return llm.generate([{"prompt_token_ids": row} for row in prompts], ask, use_tqdm=False)

    notes.is_open = True
    outputs = generate(rows, max_tokens=new, prompt_logprobs=1)
    logs, likeliest = [], []
    for row, output in zip(rows, outputs, strict=True):
        entries = list(zip(row[1:], output.prompt_logprobs[1:], strict=True))
        logs.append([entry[token].logprob for token, entry in entries])
        likeliest.append([max(entry, key=lambda token: entry[token].logprob) for _, entry in entries])
    notes.tensors |= {
        "logprobs": torch.tensor(logs),
        "likeliest": torch.tensor(likeliest),
        "greedy": torch.tensor([list(output.outputs[0].token_ids) for output in outputs]),
    }
    attention = {type(m.impl).__name__ for m in model.modules() if hasattr(m, "impl") and hasattr(m, "kv_cache_dtype")}
    cache = {str(m.kv_cache_dtype) for m in model.modules() if hasattr(m, "impl") and hasattr(m, "kv_cache_dtype")}
    notes.save(out, runtime=f"vLLM {vllm.__version__}", attention=", ".join(attention), kv_cache=", ".join(cache))


def probe_transformers(directory: Path, request: Mapping[str, Any], out: Path) -> None:
    """Runs the rows of `request` in transformers, which unpacks the weights of quantized layers."""
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", trust_remote_code=request["trust_remote_code"]
    )
    model = model.to(device).eval()
    notes = Notes()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            kernel = "16 bit" if getattr(module, "quantization_scheme", None) is None else type(module).__name__
            module.register_forward_hook(_block_hook(notes, name, kernel))
        elif hasattr(module, "experts") and hasattr(module, "gate"):
            module.register_forward_hook(_block_hook(notes, name, type(module.experts).__name__))
    notes.is_open = True
    rows = torch.tensor(request["rows"], device=device)
    with torch.no_grad():
        notes.tensors |= score(model, rows)
        notes.tensors["greedy"] = continue_greedily(model, rows, request["new_tokens"])
    notes.save(out, runtime=f"transformers {transformers.__version__}", attention="", kv_cache="")


def score(model: Any, rows: Tensor) -> dict[str, Tensor]:
    """Returns the log-probability of every token of `rows` but the first, and the likeliest token in its place."""
    logits = torch.cat([model(input_ids=row[None]).logits[:, :-1].float().cpu() for row in rows])
    own = logits.log_softmax(-1).gather(-1, rows[:, 1:, None].cpu())[..., 0]
    return {"logprobs": own, "likeliest": logits.argmax(-1)}


def continue_greedily(model: Any, rows: Tensor, new: int) -> Tensor:
    """Returns the next `new` tokens after each row, int64 `[rows, new]`; each step reads the whole text."""
    text = rows
    for _ in range(new):
        following = torch.cat([model(input_ids=row[None]).logits[:, -1].argmax(-1) for row in text])
        text = torch.cat([text, following[:, None]], 1)
    return text[:, rows.shape[1] :].cpu().contiguous()


PROBES = {"vllm": probe_vllm, "transformers": probe_transformers}


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
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if runtime == "transformers" and not (config.get("quantization_config") or {}).get("dequantize"):
        # It unpacks some weights to another dtype than the model's, and fails.
        dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"), torch.bfloat16)
        for message in unpacking_warnings(describe(directory)[0], dtype):
            raise UserError(f"{directory}: {message}")
    rows = _rows(directory, config)
    request = {
        "rows": rows.tolist(),
        "new_tokens": NEW_TOKENS,
        "engine": engine or {},
        "trust_remote_code": trust_remote_code,
    }
    with tempfile.TemporaryDirectory() as folder:
        facts, seen = _probe(runtime, directory, request, Path(folder))
    return _compare(load(directory, trust_remote_code=trust_remote_code), rows, facts, seen)


def _rows(directory: Path, config: dict[str, Any]) -> Tensor:
    """Returns the token ids `[TEXTS, TOKENS]` of several kinds of texts, or drawn at random without a tokenizer."""
    vocabulary = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size", 256)
    if not (directory / "tokenizer.json").is_file():
        return torch.randint(vocabulary, (TEXTS, TOKENS), generator=torch.Generator().manual_seed(0), device="cpu")
    tokenizer = load_tokenizer(directory)
    texts = ["\n\n".join(sample_texts(name)) for name in ("prose", "code", "manual", "languages")]
    rows = [tokenizer(text).input_ids[:TOKENS] for text in texts]
    return torch.tensor([row[: min(map(len, rows))] for row in rows], device="cpu")


def _probe(runtime: str, directory: Path, request: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Any]:
    (folder / "rows.json").write_text(json_text(request), encoding="utf-8")
    command = [sys.executable, "-m", "quant.export.checkpoint.runtime_check", runtime, str(directory)]
    done = subprocess.run(
        [*command, str(folder / "rows.json"), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if not (folder / "probe.json").is_file():
        # Servers print many lines after an error, and the first error is the cause of the others.
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        named = [" ".join(lines[i : i + 2]) for i, line in enumerate(lines) if re.search(r"Error(: |:?$)", line)]
        error = (named or lines[-1:] or ["it printed nothing"])[0][-300:]
        raise UserError(f"{directory}: {runtime} does not run it: {error}")
    return json.loads((folder / "probe.json").read_text(encoding="utf-8")), load_file(folder / "probe.safetensors")


def _compare(model: nn.Module, rows: Tensor, facts: dict[str, Any], seen: dict[str, Tensor]) -> RuntimeCheck:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device)
    modules = dict(model.named_modules())
    layers, members = [], {}
    for index, layer in enumerate(facts["layers"]):
        references = [_module(name, modules) for name in layer["members"]]
        layers.append(_layer(layer, references, seen[f"x.{index}"].to(device), seen[f"y.{index}"].to(device)))
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


def _difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Returns the mean absolute difference of log-probabilities of two runs of `score`, in nat."""
    return float((one["logprobs"] - other["logprobs"]).abs().mean())


def _module(name: str, modules: dict[str, nn.Module]) -> nn.Module | None:
    """Returns our module for the runtime's name; models with several towers differ in what precedes `layers`."""
    if name in modules:
        return modules[name]
    tail = name[name.find("layers.") :] if "layers." in name else name.rpartition(".")[2]
    candidates = [module for other, module in modules.items() if other.endswith(f".{tail}") or other == tail]
    return candidates[0] if len(candidates) == 1 else None


def _layer(layer: dict[str, Any], references: Sequence[nn.Module | None], x: Tensor, y: Tensor) -> RuntimeLayer:
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
def _outputs(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
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
    return next((p.dtype for p in module.parameters() if p.is_floating_point() and p.dim() > 1), torch.bfloat16)


def _error(expected: Tensor, y: Tensor) -> float:
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


def main(arguments: Iterator[str]) -> None:
    """Runs the program; the module's docstring lists its arguments."""
    runtime, directory, rows, out = arguments
    PROBES[runtime](Path(directory), json.loads(Path(rows).read_text(encoding="utf-8")), Path(out))
    sys.stdout.flush()
    os._exit(0)  # the files are written, and a server's teardown may take minutes


if __name__ == "__main__":
    main(iter(sys.argv[1:]))
