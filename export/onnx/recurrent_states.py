"""What recurrent layers of a hybrid keep from token to token, as caches of the serving graph beside keys and values.

    past_conv.N    [batch, channels, width − 1]         the last inputs of a causal convolution, in the model's dtype
    past_state.N   [batch, heads, head_dim, state]      Mamba-2's state, in FP32
                   [batch, heads, key_dim, value_dim]   that of a gated delta rule, in FP32

transformers computes such layers by functions of their modeling files, which a graph replaces while it is traced:

    causal_conv1d_fn               short convolutions of LFM2, Mamba-2 and Gated DeltaNet
    mamba2_chunk_scan              S ← exp(A·dt)·S + dt·x⊗B,  y = S·C + D·x         all tokens of a step at once
    torch_chunk_gated_delta_rule   S ← e^g·S,  S ← S + k⊗β(v − kᵀS),  y = qᵀS       token by token, by Scan

Unlike a cache of keys, a state has no positions: each token must change it once. So tokens behind a row's last one
change nothing (dt, g and β are 0 there), and a row whose `lengths` is 0 begins with an empty state, whatever it holds.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quant.base.errors import option
from quant.export.onnx.decoder_graph import GraphInput
from quant.export.onnx.serving import IDS, LAST, LENGTHS, GroupedAttention, ServingGraph
from quant.kernels.linear.conv import QuantConv
from quant.recipes.blocks import cache_of

STATES = ("conv", "state")
STEP_TOKENS = 64
"""Tokens of a step: Mamba-2 multiplies the tokens of one in pairs, as its own chunks of this order."""
_FUNCTIONS = ("causal_conv1d_fn", "mamba2_chunk_scan", "torch_chunk_gated_delta_rule")
_PARTS = ("keys", "values", "conv_states", "recurrent_states")  # of the layers of transformers' caches
_CLOSE = 0.1  # largest relative difference of logits in one step and in two, where inputs are rounded


@dataclass(eq=False)
class HybridCache(GroupedAttention):
    """Attention over a KV cache, and recurrent layers over their states, while a graph is traced."""

    recurrent: bool = True

    @contextmanager
    def replacing(self, model: nn.Module) -> Iterator[None]:
        conv = next((name for module, name in self.names.items() if isinstance(module, QuantConv)), None)
        if conv is not None:
            raise ValueError(
                f"{conv}: the model multiplies by this convolution's weight in code of its own, where a graph has no "
                f"quantized layer; quantize again with {option('exclude', repr(conv))}"
            )
        plain = recurrent_functions(model)
        for file, name in plain:
            setattr(file, name, getattr(self, name))
        try:
            with super().replacing(model):
                yield
        finally:
            for (file, name), function in plain.items():
                setattr(file, name, function)

    def check(self, model: nn.Module, past: Mapping[str, GraphInput]) -> None:
        """Compares two steps of the graph, and what it keeps, with one pass of the model over its own cache."""
        ids = torch.arange(1, 11, device=next(model.parameters()).device).view(2, 5)
        lengths, graph = torch.zeros_like(ids[:, 0]), ServingGraph(model, self)
        with torch.no_grad():
            whole = model(input_ids=ids, use_cache=True)
            with self.replacing(model):
                inputs = {IDS: ids[:, :3], LENGTHS: lengths, LAST: lengths + 2}
                _, *caches = graph(inputs, [x.example for x in past.values()])
                logits, *_ = graph({IDS: ids[:, 3:], LENGTHS: lengths + 3, LAST: lengths + 1}, caches)
        parts = [getattr(layer, name, None) for layer in getattr(cache_of(whole), "layers", ()) for name in _PARTS]
        tensors = [x for part in parts for x in (part.values() if isinstance(part, dict) else [part]) if x is not None]
        difference = float((logits - whole.logits[:, -1]).norm() / whole.logits[:, -1].norm())
        if len(tensors) != len(past) or not difference < _CLOSE:
            raise ValueError(
                f"{type(model).__name__} keeps {len(tensors)} tensors from token to token, and a graph {len(past)} "
                f"(two steps differ from one by {difference:.2g}): it has recurrent layers that no graph holds; serve "
                f"its checkpoint (vLLM), or export {option('input', 'input_ids:int64:batch,64')}, of one length"
            )

    def causal_conv1d_fn(
        self, x: Tensor, weight: Tensor, bias: Any = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        """Convolves `x` `[batch, channels, tokens]` by `weight` `[channels, width]`."""
        from transformers.activations import ACT2FN

        width = weight.shape[1] - 1
        tokens = torch.cat([self._past("conv", x.new_zeros(*x.shape[:2], width)), x], -1)
        y = F.conv1d(tokens.to(weight.dtype), weight[:, None], bias, groups=len(weight)).to(x.dtype)
        last = self.inputs[LAST][:, None, None] + torch.arange(1, width + 1, device=x.device)
        self.new.append(tokens.gather(2, last.expand(-1, x.shape[1], -1)))
        return y if activation is None else ACT2FN[activation](y)

    def mamba2_chunk_scan(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
        dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> Tensor:  # fmt: skip
        """Returns y, like `x` `[batch, tokens, heads, dim]`; dt `[batch, tokens, heads]`, B, C `[…, groups, n]`."""
        heads, groups = x.shape[2], B.shape[2]
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float() * self._real(x)[..., None]
        x, A = x.float(), A.float()
        # [batch, heads, tokens, n]
        B, C = (part.float().repeat_interleave(heads // groups, 2).transpose(1, 2) for part in (B, C))
        decay = (A * dt).cumsum(1).transpose(1, 2)  # its log from the step's begin, [batch, heads, tokens]
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        between = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, -torch.inf).exp()
        added = (x * dt[..., None]).transpose(1, 2)  # [batch, heads, tokens, dim]
        past = self._past("state", x.new_zeros(x.shape[0], heads, x.shape[3], B.shape[3]))
        y = (C @ B.mT * between) @ added + C @ past.mT * decay.exp()[..., None]
        until_end = (decay[..., -1:] - decay).exp()[..., None]
        self.new.append(past * decay[..., -1].exp()[..., None, None] + added.mT @ (B * until_end))
        y = y.transpose(1, 2).contiguous()
        return y if D is None else y + D[:, None] * x

    def torch_chunk_gated_delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Returns y, like `value` `[batch, tokens, heads, dim]`, and no state; g and beta `[batch, tokens, heads]`."""
        dtype, heads, real = value.dtype, value.shape[2], self._real(value)[..., None]
        q, k = (x.float().repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
        if use_qk_l2norm_in_kernel:
            q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        q = q * q.shape[3] ** -0.5

        past = self._past("state", q.new_zeros(q.shape[0], heads, q.shape[3], value.shape[3]))
        rows = (x.transpose(0, 1)[..., None, :] for x in (q, k, value.float()))
        scalars = (x.transpose(0, 1)[..., None, None] for x in ((g.float() * real).exp(), beta.float() * real))
        y, state = torch.ops.quant.onnx_delta_rule(past, *rows, *scalars)
        self.new.append(state)
        return y[..., 0, :].transpose(0, 1).to(dtype), None

    def _past(self, kind: str, empty: Tensor) -> Tensor:
        self.kinds.append(kind)
        if not self.past:
            return empty
        begins = (self.inputs[LENGTHS] == 0)[:, None, None]
        return torch.where(begins if empty.dim() == 3 else begins[..., None], empty, self.past[len(self.new)])

    def _real(self, x: Tensor) -> Tensor:
        """Returns 1 for the tokens of `x` `[batch, tokens, …]` up to each row's last one and else 0."""
        return (torch.arange(x.shape[1], device=x.device) <= self.inputs[LAST][:, None]).float()


def recurrent_functions(model: nn.Module) -> dict[tuple[Any, str], Callable[..., Any]]:
    """Returns the functions that recurrent layers of a transformers model call, by modeling file and name."""
    files = [sys.modules[name] for name in sorted({type(module).__module__ for module in model.modules()})]
    return {(file, name): getattr(file, name) for file in files for name in _FUNCTIONS if hasattr(file, name)}
