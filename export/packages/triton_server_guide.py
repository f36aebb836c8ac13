"""`serve.md` lists the commands that serve a checkpoint: vLLM, SGLang, TensorRT-LLM and Triton Inference Server.

The first three read the checkpoint and generate text; the last runs the engine that `triton_server.publish` put into
its repository. The page says how a runtime runs the checkpoint's formats or why it does not read them
(`quant.recipes.targets`), and which run-time parts of a layer it ignores.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quant.export.checkpoint.files.compressed_tensors import runtime_warnings
from quant.export.packages.triton_decoder import END_TOKENS
from quant.export.packages.triton_server import Bundle, built_by
from quant.recipes.plan import LayerPlan, Plan
from quant.recipes.targets import Pair, Target, get_target


def serving_text(directory: Path, plan: Plan | None, bundle: Bundle, receipt: Mapping[str, Any], *, text: bool) -> str:
    """Returns the text of `serve.md`.

    Args:
        directory: the checkpoint.
        plan: of the checkpoint.
        bundle: the version published for Triton.
        receipt: of its engine.
        text: whether the model generates text, which the first three serve.
    """
    parts = [f"# Serving {bundle.name}\n"]
    if text:
        parts += [_vllm(directory, plan, bundle.name), _sglang(directory, plan), _trtllm(directory, plan)]
    # A model that answers in a stream is decoupled, and the server has no `infer` over HTTP for such a model.
    is_text_server = END_TOKENS in receipt
    server = _triton_text(bundle, receipt) if is_text_server else _triton(bundle, receipt)
    return "\n".join([*parts, server + _canary(directory, bundle, "generate" if is_text_server else "infer")])


def _vllm(directory: Path, plan: Plan | None, name: str) -> str:
    cache = " --kv-cache-dtype fp8" if plan is not None and plan.kv_cache is not None else ""
    warnings = "".join(f"\nWarning: {line}.\n" for line in (runtime_warnings(plan) if plan else ()))
    target = get_target("vllm")
    if not _reads(target, plan):
        return f"## vLLM\n\nIt does not read this checkpoint. {_how_it_runs(target, plan)}\n{warnings}"
    return f"""## vLLM

It reads the checkpoint as it is (compressed-tensors). {_how_it_runs(target, plan)}
{warnings}
    vllm serve {directory} --served-model-name {name}{cache}
    curl -s localhost:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{{"model": "{name}", "prompt": "Once upon a time", "max_tokens": 32}}'
"""


def _sglang(directory: Path, plan: Plan | None) -> str:
    target = get_target("sglang")
    if not _reads(target, plan):
        return f"## SGLang\n\nIt does not read this checkpoint. {_how_it_runs(target, plan)}\n"
    return f"""## SGLang

It reads the checkpoint as it is. {_how_it_runs(target, plan)}

    python -m sglang.launch_server --model-path {directory} --port 30000
"""


def _trtllm(directory: Path, plan: Plan | None) -> str:
    target = get_target("tensorrt-llm-compressed-tensors")
    if not _reads(target, plan):
        body = f"""It does not read this checkpoint. {_how_it_runs(target, plan)} It reads
{", ".join(map(str, target.pairs))}. FP8 with static inputs, MXFP8 and mixtures with them are for ModelOpt's layout,
which `quant export {directory} --to modelopt` writes.
"""
    else:
        body = f"""Its PyTorch backend reads the checkpoint as it is. {_how_it_runs(target, plan)}

    trtllm-serve serve {directory} --backend pytorch --host 0.0.0.0 --port 8000
"""
    return f"## TensorRT-LLM\n\n{body}"


def _pairs(target: Target, plan: Plan | None) -> list[tuple[LayerPlan, Pair | None]]:
    quantized = plan.quantized if plan is not None else ()
    return [(layer, target.pair(layer.weight, layer.activation)) for layer in quantized if layer.weight is not None]


def _reads(target: Target, plan: Plan | None) -> bool:
    return all(pair is not None for _, pair in _pairs(target, plan))


def _how_it_runs(target: Target, plan: Plan | None) -> str:
    """Returns a sentence for each pair of formats in the plan: how a runtime runs it, or why it does not."""
    sentences = [
        f"{layer.formats}: {target.why_not(layer) or 'it has no such pair'}."
        if pair is None
        else f"{pair}: {pair.runs}{f', {pair.note}' if pair.note else ''}."
        for layer, pair in _pairs(target, plan)
    ]
    return " ".join([*dict.fromkeys(sentences), f"From: {target.source}."])


def _triton(bundle: Bundle, receipt: Mapping[str, Any]) -> str:
    engine = receipt["engine"]
    release = str(engine["backend"]).partition(" ")[2]
    repository = bundle.repository.resolve()
    # A serialized engine loads only in the TensorRT release that built it.
    if built_by(receipt) == "tensorrt":
        needs = f"The server's TensorRT must be {release}, which built the engine; its release notes name it."
        start = f"""    docker run --rm --gpus all -p 8000:8000 -p 8001:8001 -p 8002:8002 -v {repository}:/models \\
        nvcr.io/nvidia/tritonserver:$TRITON-py3 tritonserver --model-repository=/models"""
    else:
        needs = (
            "The engine is one of TensorRT-RTX, which the server's own backend does not load; `model.py` in each "
            "version runs it through the Python backend, which needs two packages in the server's image."
        )
        start = f"""    docker run --rm --gpus all -p 8000:8000 -p 8001:8001 -p 8002:8002 -v {repository}:/models \\
        nvcr.io/nvidia/tritonserver:$TRITON-py3 \\
        bash -c 'pip install torch tensorrt-rtx=={release} && tritonserver --model-repository=/models'"""
    ranges = "".join(f"    {text}\n" for text in engine["profiles"]) or "    all fixed\n"
    return f"""## Triton Inference Server

The engine is for {engine["target"]}. {needs} TRITON is the server's release, such as 26.09.

{start}

Shapes (smallest, best and largest):

{ranges}
    curl -s localhost:8000/v2/models/{bundle.name}/versions/{bundle.version}/ready -o /dev/null -w '%{{http_code}}\\n'
    curl -s localhost:8000/v2/models/{bundle.name}/config
"""


def _triton_text(bundle: Bundle, receipt: Mapping[str, Any]) -> str:
    """Returns the section on a decoder, which the Python backend runs with this library."""
    engine = receipt.get("engine")
    runtime = built_by(receipt) if engine else "onnxruntime"
    version = str(engine["backend"]).partition(" ")[2] if engine else ""
    extra = {"onnxruntime": "onnx", "tensorrt_rtx": "tensorrt-rtx", "tensorrt": "tensorrt"}[runtime]
    pinned = f" {runtime.replace('_', '-')}=={version}" if version else ""
    where = f"on a GPU of {engine['target']}" if engine else "on a processor"
    return f"""## Triton Inference Server

`model.py` runs the model in {runtime} {where}, through the Python backend. The server's image needs Blockscale for it,
from a checkout in CHECKOUT. TRITON is the server's release, such as 26.09.

    docker run --rm {"--gpus all " if engine else ""}-p 8000:8000 -p 8001:8001 -p 8002:8002 \\
        -v {bundle.repository.resolve()}:/models -v $CHECKOUT:/blockscale nvcr.io/nvidia/tritonserver:$TRITON-py3 \\
        bash -c 'pip install "/blockscale[hf,{extra}]"{pinned} && tritonserver --model-repository=/models'
    curl -s localhost:8000/v2/models/{bundle.name}/generate -d '{{"text_input": "The sky is", "max_tokens": 32}}'
    curl -s localhost:8000/v2/models/{bundle.name}/generate_stream \\
        -d '{{"text_input": "The sky is", "max_tokens": 32, "stream": true, "temperature": 0.7, "top_p": 0.9}}'

Requests that wait at the same time run as one batch; others wait until its last row has ended. `model.py` was tested
with a stand-in for the backend's Python module, and never inside the server.
"""


def _canary(directory: Path, bundle: Bundle, request: str) -> str:
    """Returns the section on two versions at once; `request` is the server's name of a request to the model."""
    return f"""
### Canary

The two newest versions are served. A request to `/v2/models/{bundle.name}/{request}` gets the newest, one to
`/v2/models/{bundle.name}/versions/N/{request}` version N: let a router send it a share of the traffic. The next
`quant export {directory} --to triton-server --out {bundle.repository}` adds the next version; a server that was started
with `--model-control-mode=poll` takes it up, and drops a version when its folder is removed.
"""
