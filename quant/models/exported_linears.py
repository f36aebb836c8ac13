"""`restore_linears` puts the linear layers of an exported program back as modules.

An exported program has no layers: its graph reads parameters and calls functions on them.

    f_weight = get_attr[f.weight];  f_bias = get_attr[f.bias];  y = aten.linear(x, f_weight, f_bias)

Quantization replaces modules, so each such call becomes a call of an `nn.Linear` with the same parameters under the
same names, `y = call_module[f](x)`. The graph computes the same as before.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import GraphModule, Node


def restore_linears(model: nn.Module) -> None:
    """Makes modules of the calls of `aten.linear` that are the only readers of their weight and bias.

    A weight with other readers stays as it is, because these would go on reading it in 16 bit.
    """
    if not isinstance(model, GraphModule):
        return
    calls: dict[str, list[Node]] = {}
    for node in model.graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.aten.linear.default:
            calls.setdefault(_module_path(node), []).append(node)
    for path, nodes in calls.items():
        if path and all(_are_only_readers(node, nodes) for node in nodes):
            _restore(model, path, nodes)
    model.graph.lint()
    model.recompile()


def _module_path(call: Node) -> str:
    """Returns the path of the module with a call's parameters: `a` for `a.weight` and `a.bias`.

    Empty where there is none.
    """
    weight, bias = call.args[1], call.args[2] if len(call.args) > 2 else None
    if not isinstance(weight, Node) or weight.op != "get_attr" or call.kwargs:
        return ""
    path, _, last = str(weight.target).rpartition(".")
    if last != "weight" or (bias is not None and (not isinstance(bias, Node) or bias.target != f"{path}.bias")):
        return ""
    return path


def _are_only_readers(call: Node, calls: list[Node]) -> bool:
    """Returns whether only `calls`, which share their parameters, read them."""
    parameters = [node for node in call.args[1:] if isinstance(node, Node)]
    targets = [node.target for node in parameters]
    reads = [node for node in call.graph.nodes if node.op == "get_attr" and node.target in targets]
    same = all([n.target for n in other.args[1:] if isinstance(n, Node)] == targets for other in calls)
    return same and all(user in calls for node in reads for user in node.users)


def _restore(model: GraphModule, path: str, calls: list[Node]) -> None:
    held = model.get_submodule(path)
    weight, bias = held.weight, getattr(held, "bias", None)
    assert isinstance(weight, nn.Parameter)
    # The constructor would fill a matrix with random numbers, only for the next line to replace it.
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight, linear.bias = weight, bias  # type: ignore[assignment]
    linear.train(model.training)
    model.set_submodule(path, linear)
    for call in calls:
        with model.graph.inserting_before(call):
            new = model.graph.call_module(path, (call.args[0],))
        # `meta` holds the call's fake tensor and stack trace, which later passes over the graph rely on.
        new.meta = call.meta
        call.replace_all_uses_with(new)
        read = [node for node in call.args[1:] if isinstance(node, Node)]
        model.graph.erase_node(call)
        # A get_attr that nobody reads still names the 16-bit parameter, which goes when the module is quantized: `lint`
        # and every forward pass would fail on it.
        for node in read:
            if not node.users:
                model.graph.erase_node(node)
