"""Reads from a built engine in which precision each GEMM and each attention runs, without a GPU.

Each kernel of an engine (`engine_file`) names the ONNX nodes that were fused into it. A layer's GEMM is the kernel that
holds its MatMul or Conv node, `model.layers.0.mlp.up_proj/MatMul`. The graph names the nodes of layers in 16 bit in the
same way, so that a layer which was planned in fewer bits and never quantized is found in half precision; only a layer
that the graph lacks may be missing. A convolution is a `corrltn` or `convolution`, a transposed one a `deconvolution`:
TensorRT-RTX 1.7 runs the first kind in INT8 and FP8, pads channels where it has to, and runs the second in half.

TensorRT silently runs a layer in half precision if the graph misses one of its patterns. The precision is read from
types, not from kernel names:

    fp4 · fp8 · int8        both operands of the GEMM are codes
    half, fp4 weights       weights are stored as codes and multiplied in 16 bit, as in a weight-only format
    half                    no trace of the quantization is left

A `runtime_fusion` is compiled on the GPU that runs it; its parts follow as a small program of their own, whose GEMM
shows the types that are multiplied.

What the kernels compute, and with which numbers, is for `rebuild` to say.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.base.errors import option
from quant.export.onnx.serving import new_name
from quant.export.tensorrt.engine_file import BITS, MULTIPLYING, PRODUCTS, Kernel, KernelOperand, read_engine
from quant.formats.format import E8M0
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Plan

UNPLANNED = "–"
"""The planned precision where there is no plan, and of a row that says what was not looked at."""

_AUDITED = (LayerKind.LINEAR, LayerKind.HEAD, LayerKind.CONV)
NOT_EXPORTED = "not in the exported graph"
_ELEMENTS = {"e2m1": "fp4", "e4m3": "fp8", "int8": "int8", "int4": "int4"}


@dataclass(frozen=True)
class AuditRow:
    """A layer, attention or other GEMM as planned and as found, the worst of the engine's programs."""

    name: str
    planned: str
    found: str
    passed: bool


def audit(
    path: str | Path, plan: Plan | None = None, *, attention: str | None = None, attention_nodes: Sequence[str] = (),
    exported: Collection[str] | None = None, dtypes: Sequence[str] | None = None,
) -> list[AuditRow]:  # fmt: skip
    """Compares the precisions of an engine with a plan.

    One finding for each planned layer, then other GEMMs, attentions, inputs that no kernel reads, and parts of a KV
    cache that are updated as others. `exported` are the layers that its graph must have, by which a layer that no
    output depends on is not missed; without them the engine must have every planned layer. `dtypes` are those of the
    parameters: of a model in FP32 alone, inputs in 16 bit are in FP32. Other arguments left out are
    read from the record in the engine, if our own builder wrote it.
    """
    engine = read_engine(path)
    kernels, record = engine.kernels, engine.record
    if attention is None and record.get("attention") == "none":
        attention = "half"
    if isinstance(contents := record.get("contents"), dict):
        attention_nodes = attention_nodes or contents["attention_nodes"]
        dtypes = dtypes or (contents.get("export") or {}).get("dtypes")
    wide = "float" if dtypes == ["float32"] else "half"
    planned = {layer.name: layer for layer in plan.quantized if layer.kind in _AUDITED} if plan else {}
    if attention is None and plan is not None and plan.attention is not None:
        attention = _ELEMENTS.get(plan.attention.element.name.lower(), "half")
    findings = [
        _audit_layer(layer, kernels, wide)
        if exported is None or name in exported
        else AuditRow(name, planned_precision(layer, wide), NOT_EXPORTED, True)
        for name, layer in planned.items()
    ]
    findings += [*_audit_unplanned(kernels, planned), *_audit_attention(kernels, attention, attention_nodes)]
    # TensorRT-RTX 1.7's parser drops `nonpad_kv_seqlen` of Attention with a warning: the engine has the input, unread.
    findings += [AuditRow(name, "an input that is read", "read by no kernel", False) for name in engine.unread]
    return findings + [
        AuditRow(past, f"updated in place as {new_name(past)}", f"as {output}", False)
        for past, output in engine.updated.items()
        if output != new_name(past)
    ]


def failures(findings: Iterable[AuditRow]) -> list[str]:
    """Returns one clause for each finding that did not pass."""
    return [f"{f.name}: planned {f.planned}, found {f.found}" for f in findings if not f.passed]


def fallback_message(problems: Sequence[str]) -> str:
    """Returns the error for layers that do not run as planned."""
    shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
    return (
        f"not run as planned in the engine: {shown}. Change the formats in the plan, or "
        f"pass {option('allow_fallback', True)} to take the engine as it is"
    )


def is_storage_only(layer: LayerPlan) -> bool:
    """Returns whether TensorRT stores the layer in fewer bits and multiplies in half precision, whatever the inputs."""
    return layer.weight is not None and layer.weight.scale is E8M0


def planned_precision(layer: LayerPlan, wide: str = "half") -> str:
    """Returns the precision in which a planned layer should run; `wide` is that of inputs in 16 bit."""
    formats = (layer.weight_format, layer.activation or layer.weight_format)
    weight, activation = (_ELEMENTS.get(x.element.name.lower(), x.element.name.lower()) for x in formats)
    if layer.activation is None or is_storage_only(layer):
        return f"{wide}, {weight} weights"
    return weight if weight == activation else f"{activation}, {weight} weights"


def _is_gemm_of(kernel: Kernel, layer: str) -> bool:
    return kernel.is_gemm and any(node.startswith(f"{layer}{kind}") for node in kernel.nodes for kind in PRODUCTS)


def _audit_layer(layer: LayerPlan, kernels: Sequence[Kernel], wide: str) -> AuditRow:
    planned = planned_precision(layer, wide)
    precisions = [_precision(kernel, kernels) for kernel in kernels if _is_gemm_of(kernel, layer.name)]
    if not precisions:
        return AuditRow(layer.name, planned, "no GEMM of its name in the engine", False)
    # A format that one TensorRT only stores may have a GEMM of its own in another.
    accepted = {planned, "fp8"} if is_storage_only(layer) else {planned}
    wrong = [precision for precision in precisions if precision not in accepted]
    return AuditRow(layer.name, planned, (wrong or precisions)[0], not wrong)


def _audit_unplanned(kernels: Sequence[Kernel], planned: Mapping[str, Any]) -> Iterator[AuditRow]:
    """Yields a finding for each GEMM that no planned layer owns: one kept in 16 bit or, without a plan, any."""
    seen = set()
    for kernel in kernels:
        names = [node.rpartition("/")[0] for node in kernel.nodes if node in kernel.matmuls] or kernel.nodes
        name = "+".join(names) or kernel.name
        if kernel.is_gemm and name not in seen and not any(_is_gemm_of(kernel, layer) for layer in planned):
            seen.add(name)
            yield AuditRow(name, "16 bit" if planned else UNPLANNED, _precision(kernel, kernels), True)


def _attended(kernel: Kernel) -> list[KernelOperand]:
    """Returns q, k and v of an attention; a mask, which has no codes, comes between k and v."""
    matrices = [operand for operand in kernel.inputs if operand.is_matrix]
    # q [batch · heads, queries, dim], k, mask [batch, 1, queries, keys], v; heads may be a dimension of their own.
    if len(matrices) > 3 and len(matrices[2].dims) == 4 and matrices[2].dims[1] == 1:
        _, k, mask, v, *further = matrices
        if len(k.dims) != 4 or (mask.dims != k.dims and v.dims == k.dims):
            matrices = [*matrices[:2], v, *further]
    return matrices[:3]


def _audit_attention(kernels: Sequence[Kernel], required: str | None, nodes: Sequence[str]) -> Iterator[AuditRow]:
    """Yields findings for fused attentions, and for attention nodes of the graph that were not fused."""
    precisions: dict[str, str] = {}
    for kernel in kernels:
        if kernel.is_attention and not kernel.is_body:
            name = next((node for node in kernel.nodes if node in nodes), "+".join(kernel.nodes) or kernel.name)
            types = [operand.type for operand in _attended(kernel)]
            precision = types[0] if len(set(types)) == 1 else "/".join(types)
            # The worst of the engine's programs counts: only a precision that passes is replaced.
            if precisions.get(name) in (None, required):
                precisions[name] = precision
    for name in dict.fromkeys((*precisions, *nodes)):
        precision = precisions.get(name, "not fused")
        layer = name.rpartition("/")[0] or name
        yield AuditRow(layer, required or UNPLANNED, precision, required in (None, precision))


def _precision(gemm: Kernel, kernels: Sequence[Kernel]) -> str:
    """Returns the types of a GEMM's operands and, for a weight in 16 bit, of the codes that it came from."""
    matrices = [operand for operand in gemm.inputs if operand.is_matrix]
    if gemm.kind == "runtime_fusion":
        # A fusion lists the operands of all its parts; the GEMM among the parts has the types that are multiplied.
        inside = [k for k in kernels if k.is_body and k.kind in MULTIPLYING and k.matmuls & gemm.matmuls]
        multiplied = inside[0] if inside else None
    else:
        multiplied = gemm
    if multiplied is None or len(multiplied.inputs) < 2:
        return "unknown"
    activation, weight = (operand.type for operand in multiplied.inputs[:2])
    if BITS.get(weight, 16) >= 16:
        # The weight was unpacked to 16 bit inside this kernel, or by another kernel that writes this one's operand.
        read = {(gemm.program, operand.name) for operand in matrices}
        unpackers = [k for k in kernels if not k.is_gemm and any((k.program, name) in read for name in k.outputs)]
        near = [*matrices, *(operand for kernel in unpackers for operand in kernel.inputs)]
        # Block scales are far smaller than the weight. The builder expands MXFP8's to the weight's size, in a wider
        # type, so the narrowest of the constants of about its size is the weight.
        stored = [o for o in near if o.constant and o.is_matrix and 8 * o.size >= multiplied.inputs[1].size]
        weight = min(stored, key=lambda o: BITS[o.type]).type if stored else weight
    if weight == activation or BITS.get(weight, 16) >= 16:
        return activation
    return f"{activation}, {weight} weights"
