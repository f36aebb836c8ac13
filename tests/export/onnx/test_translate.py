"""Graphs are optimized in a time that grows as they do, with the result that onnxscript alone gives."""

from __future__ import annotations

from typing import Any

import pytest

ir = pytest.importorskip("onnx_ir", reason="needs the extra onnx")
optimizer = pytest.importorskip("onnxscript.optimizer", reason="needs the extra onnx")

from quant.export.onnx.translate import _comparing_ops_first  # noqa: E402 -- needs onnxscript

NODES = 200


def chain() -> Any:
    """Sums, casts that do nothing, and two transpositions that undo each other, one after the other."""
    kind = ir.TensorType(ir.DataType.FLOAT)
    start = value = ir.Value(name="x", shape=ir.Shape([2, 3]), type=kind)
    nodes = []
    for number in range(NODES):
        attributes: dict[str, Any] = {}
        name, inputs = ("Add", [value, start]) if number % 4 == 0 else ("Transpose", [value])
        if name == "Transpose":
            attributes = {"perm": [1, 0]} if number % 4 != 3 else {"perm": [0, 1]}
        node = ir.node(name, inputs, attributes, name=f"{name}_{number}")
        value = node.outputs[0]
        value.name = f"v{number}"
        nodes.append(node)
    value.type, value.shape = kind, ir.Shape([2, 3])
    graph = ir.Graph([start], [value], nodes=nodes, opset_imports={"": 20}, name="chain")
    return ir.Model(graph, ir_version=10)


def optimized(monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, int, int]:
    """The serialized model, how many nodes it has, and how often a node was asked for its op."""
    model, asked = chain(), [0]
    plain = ir.Node.op_identifier

    def counted(node: Any) -> Any:
        asked[0] += 1
        return plain(node)

    with monkeypatch.context() as patched:
        patched.setattr(ir.Node, "op_identifier", counted)
        optimizer.optimize(model)
    return ir.to_proto(model).SerializeToString(), len(model.graph), asked[0]


def test_the_graph_is_that_of_onnxscript_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, nodes, before = optimized(monkeypatch)
    with _comparing_ops_first():
        found, _, after = optimized(monkeypatch)
    assert found == expected and nodes < NODES
    # Alone, it asks every node once for each node.
    assert after < 20 * NODES < before
