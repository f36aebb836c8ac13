"""This program loads a checkpoint in a runtime, as a server would, and notes what each layer computes.

    python -m quant.export.checkpoint.runtime_probe vllm DIR ROWS.json OUT

It is a process of its own, because a runtime takes the GPU's memory, and settings that hold for the whole process.
`quant.export.checkpoint.runtime_check` starts it, reads its notes, and compares.

    OUT/probe.json          versions, and name, members and kernel of each layer
    OUT/probe.safetensors   x.i and y.i: some rows of the input and the output of layer i, at its first call
                            logprobs [rows, tokens - 1], likeliest [rows, tokens - 1], greedy [rows, new]

vLLM merges layers: `qkv_proj` has the members `q_proj`, `k_proj` and `v_proj`, whose outputs stand side by side. A
block of experts is noted as a whole, its router included.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from quant.base.json_files import json_text
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
        self.tensors: dict[str, torch.Tensor] = {}

    def add(self, name: str, members: list[str], kernel: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Notes the first rows of an input `[…, in]` and its output `[…, out]`."""
        if not self.is_open or name in self.layers:
            return
        index = len(self.layers)
        self.layers[name] = {"name": name, "members": members, "kernel": kernel}
        for key, value in (("x", x), ("y", y)):
            rows = value.detach().reshape(-1, value.shape[-1])[:ROWS]
            self.tensors[f"{key}.{index}"] = rows.float().cpu().contiguous()

    def save(self, out: Path, **facts: Any) -> None:
        """Writes both files."""
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, out / "probe.safetensors")
        (out / "probe.json").write_text(json_text({**facts, "layers": list(self.layers.values())}))


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

    def noted(layer: nn.Module, x: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        # A kernel may use its input as a workspace, so the rows are copied before.
        before = x.detach().reshape(-1, x.shape[-1])[:ROWS].clone() if notes.is_open else x
        y = apply(layer, x, *arguments, **named)
        if id(layer) in names and isinstance(y, torch.Tensor):
            name, members = names[id(layer)]
            notes.add(name, members, kernel_name(layer), before, y)
        return y

    return noted


def _block_hook(notes: Notes, name: str, kernel: str) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        y = output[0] if isinstance(output, tuple) else output
        if inputs and isinstance(y, torch.Tensor):
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
        outputs: list[Any] = llm.generate([{"prompt_token_ids": row} for row in prompts], ask, use_tqdm=False)
        return outputs

    notes.is_open = True
    outputs = generate(rows, max_tokens=new, prompt_logprobs=1)
    logs, likeliest = [], []
    for row, output in zip(rows, outputs, strict=True):
        entries = list(zip(row[1:], output.prompt_logprobs[1:], strict=True))
        logs.append([entry[token].logprob for token, entry in entries])
        likeliest.append([max(entry, key=lambda token: entry[token].logprob) for _, entry in entries])
    notes.tensors |= {
        "logprobs": torch.tensor(logs), "likeliest": torch.tensor(likeliest),
        "greedy": torch.tensor([list(output.outputs[0].token_ids) for output in outputs]),
    }  # fmt: skip
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


def score(model: Any, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the log-probability of every token of `rows` but the first, and the likeliest token in its place."""
    logits = torch.cat([model(input_ids=row[None]).logits[:, :-1].float().cpu() for row in rows])
    own = logits.log_softmax(-1).gather(-1, rows[:, 1:, None].cpu())[..., 0]
    return {"logprobs": own, "likeliest": logits.argmax(-1)}


def continue_greedily(model: Any, rows: torch.Tensor, new: int) -> torch.Tensor:
    """Returns the next `new` tokens after each row, int64 `[rows, new]`; each step reads the whole text."""
    text = rows
    for _ in range(new):
        following = torch.cat([model(input_ids=row[None]).logits[:, -1].argmax(-1) for row in text])
        text = torch.cat([text, following[:, None]], 1)
    return text[:, rows.shape[1] :].cpu().contiguous()


PROBES = {"vllm": probe_vllm, "transformers": probe_transformers}


def main(arguments: Iterator[str]) -> None:
    """Runs the program; the module's docstring lists its arguments."""
    runtime, directory, rows, out = arguments
    PROBES[runtime](Path(directory), json.loads(Path(rows).read_text()), Path(out))
    sys.stdout.flush()
    os._exit(0)  # the files are written, and a server's teardown may take minutes


if __name__ == "__main__":
    main(iter(sys.argv[1:]))
