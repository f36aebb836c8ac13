"""`QuantLinear` is `nn.Linear` with a quantized weight, and `QuantExperts` the same for a stack of experts.

Some solvers leave work for run time. A linear does it to its input x in this order, before the matmul:

    x' = hadamard(x · pre_scale)                a scale that no neighbour could absorb, then a blockwise rotation
    y  = round(x') Wqᵀ + (x' Aᵀ) Bᵀ + bias      a low-rank branch in 16 bit takes x' unrounded (SVDQuant)

Both modules hold packed codes and scales as buffers. `model.float()`, `.half()` and `.to(dtype)` cast the
floating-point tensors of a module, and FP8 counts as floating point, so both override `_apply`: codes and scales
follow the module to a device and never change their dtype.

On a Hopper GPU a weight takes the layout of the fastest kernel (`kernels/layout.py`) when the module arrives there by
`.to` or `.cuda`, and otherwise at its first forward, because tools such as accelerate move tensors one by one. That
layout is for inputs in BF16; a module that gets inputs of another dtype returns to the checkpoint's layout.
`state_dict` returns the checkpoint's layout and `load_state_dict` takes it, bit for bit, wherever the module is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quant.formats.finite import is_finite
from quant.formats.format import Format
from quant.formats.stacking import Stacking
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.counters import reserve
from quant.kernels.hadamard import hadamard_block, hadamard_transform
from quant.kernels.layout import WIDENED, is_prepacked, is_wanted, prepack, restore, why_not
from quant.kernels.linear import experts
from quant.kernels.linear.ops import autocast_dtype, is_traced, quantized_linear
from quant.kernels.linear.oracle import as_stored
from quant.kernels.linear.stack import ExpertStack

_EXACT = ("codes", "scale", "global_scale", "input_scale")
# A thread whose forward finds another thread arranging the weight waits for the three tensors to change together.
_arranging = threading.RLock()


@dataclass(frozen=True, eq=False)
class RunTimeParts:
    """The work of a quantized linear at run time in addition to its matmul; by default there is none.

    Attributes:
        pre_scale: multiplies the input, `[in]`, in the model's dtype.
        hadamard: block of the rotation that follows, a power of two; 0 for none.
        lowrank: (down `[rank, in]`, up `[out, rank]`) in the model's dtype: a branch that is added to the matmul.
    """

    pre_scale: torch.Tensor | None = None
    hadamard: int = 0
    lowrank: tuple[torch.Tensor, torch.Tensor] | None = None

    def __bool__(self) -> bool:
        return self.pre_scale is not None or self.hadamard > 0 or self.lowrank is not None

    @property
    def rank(self) -> int:
        """Rank of the branch, 0 without one."""
        return 0 if self.lowrank is None else self.lowrank[0].shape[0]

    def input(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` as the weight and the branch see it, in the dtype of `x`."""
        if self.pre_scale is not None:
            x = x * self.pre_scale.to(x.dtype)
        return hadamard_transform(x, self.hadamard) if self.hadamard else x

    def branch(self, x: torch.Tensor) -> torch.Tensor | None:
        """The branch's share of the output, `[..., out]`, for an input that `input` returned."""
        if self.lowrank is None:
            return None
        down, up = self.lowrank
        return nn.functional.linear(nn.functional.linear(x, down.to(x.dtype)), up.to(x.dtype))

    def to(self, device: torch.device) -> RunTimeParts:
        """The same parts on `device`."""
        scale = None if self.pre_scale is None else self.pre_scale.to(device)
        lowrank = None if self.lowrank is None else (self.lowrank[0].to(device), self.lowrank[1].to(device))
        return RunTimeParts(scale, self.hadamard, lowrank)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ValueError where a part does not fit a weight of `shape` `[out, in]`."""
        rows, columns = shape
        if self.pre_scale is not None and self.pre_scale.shape != (columns,):
            raise ValueError(f"{name} {list(shape)}: pre_scale is {list(self.pre_scale.shape)}, expected [{columns}]")
        block = self.hadamard
        if block < 0 or block & (block - 1) or (block and columns % block):
            raise ValueError(
                f"{name} {list(shape)}: Hadamard block {block} must be a power of two that divides {columns}; "
                f"the largest is {hadamard_block(columns)}, 0 is none"
            )
        if self.lowrank is not None:
            down, up = self.lowrank
            if down.shape != (self.rank, columns) or up.shape != (rows, self.rank):
                raise ValueError(
                    f"{name} {list(shape)}: low-rank branch of {list(down.shape)} and {list(up.shape)}, "
                    f"expected [rank, {columns}] and [{rows}, rank]"
                )


class _QuantModule(nn.Module):
    """Buffers of one quantized weight, safe from dtype casts."""

    codes: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None
    input_scale: torch.Tensor | None
    has_kernel_layout = True

    def __init__(
        self,
        weight: BlockScaledTensor,
        activation: Format | None = None,
        input_scale: torch.Tensor | None = None,
        **parts: torch.Tensor | None,
    ) -> None:
        super().__init__()
        self.weight_format = weight.format
        self.activation_format = activation
        self.weight_shape = weight.shape
        exact = (weight.codes, weight.scale, weight.global_scale, input_scale)
        buffers = {**dict(zip(_EXACT, exact, strict=True)), **parts}
        # Those that are None come last: torch.export counts a module's buffers with them and names without.
        for name in sorted(buffers, key=lambda name: buffers[name] is None):
            self.register_buffer(name, buffers[name])
        if weight.codes.is_cuda:
            reserve(weight.codes.device)
        # Device and dtype of the codes, and dtype of the input, that the layout was last decided for.
        self._arranged: tuple[torch.device, torch.dtype, torch.dtype] | None = None
        self._stays_stored = False
        self._unread: str | None = None

    def check_at_first_use(self, place: str) -> None:
        """Notes that the codes are still to be searched for NaN; `place` names them in the error.

        Files are mapped, so that loading reads no codes. The search waits until the weight is read for another reason:
        it arrives at a GPU, is arranged for its first forward, or is written.
        """
        if self.codes.is_floating_point():  # only those of FP8 may be NaN
            self._unread = place

    def _check_codes(self) -> None:
        codes = self.codes
        if type(codes) is not torch.Tensor or codes.is_meta or is_traced():
            return
        if not is_finite(codes):
            wrong = int((~codes.float().isfinite()).sum())
            raise ValueError(
                f"{self._unread} holds {wrong:,} codes that are NaN or infinite; repair the model, or download it again"
            )
        self._unread = None

    @property
    def stored_weight(self) -> BlockScaledTensor:
        """The weight as the buffers hold it: perhaps in the layout of a kernel (`kernels/layout.py`)."""
        if self._unread is not None:
            self._check_codes()
        return BlockScaledTensor(self.codes, self.scale, self.weight_format, self.weight_shape, self.global_scale)

    @property
    def quantized_weight(self) -> BlockScaledTensor:
        """The weight in the layout of a checkpoint, sharing the module's buffers unless they are prepacked."""
        weight = self.stored_weight
        return restore(weight) if is_prepacked(weight) else weight

    @property
    def qweight(self) -> torch.Tensor:
        """The codes, by the name under which PEFT looks for the device of a quantized layer."""
        return self.codes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight's values, `[..., out, in]`."""
        return self.quantized_weight.dequantize(dtype)

    def arrange(self, dtype: torch.dtype = torch.bfloat16) -> None:
        """Puts the weight in the layout that is fastest for inputs of `dtype` where it is now.

        Not while it is traced, nor while a CUDA graph is captured, whose kernels keep the addresses of its weights,
        nor where accelerate copies it from the CPU anew for each forward.
        """
        codes = self.codes
        if type(codes) is not torch.Tensor or codes.is_meta or is_traced():
            return
        computed = autocast_dtype(codes.device.type) or dtype
        # Weights made in inference mode would be of no use to a later backward pass.
        with _arranging, torch.inference_mode(False):
            if not (codes.is_cuda and torch.cuda.is_current_stream_capturing()):
                if codes.is_cuda:
                    reserve(codes.device)
                weight = self.stored_weight
                wanted = self.has_kernel_layout and is_wanted(codes.device)
                wanted &= computed is torch.bfloat16 or weight.format.name in WIDENED
                if is_prepacked(weight) and not wanted:
                    self._store(restore(weight))
                    # A model that sees several dtypes does not change back and forth.
                    self._stays_stored = is_wanted(codes.device)
                elif wanted and not (
                    is_prepacked(weight) or self._stays_stored or _is_offloaded(self) or why_not(weight)
                ):
                    self._store(prepack(weight))
            self._arranged = (self.codes.device, self.codes.dtype, dtype)

    def take(self, weight: BlockScaledTensor) -> None:
        """Holds `weight` from now on: the same values, perhaps in a layout of a kernel, or a view of a larger one."""
        with _arranging:
            self._store(weight)
            self._arranged = None

    def _store(self, weight: BlockScaledTensor) -> None:
        if weight.codes.is_cuda:
            # Other streams may still read the memory that is freed here, and will read what this stream has written.
            torch.cuda.synchronize(weight.codes.device)
        self.codes, self.scale, self.global_scale = weight.codes, weight.scale, weight.global_scale

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> _QuantModule:
        before = {name: getattr(self, name) for name in _EXACT}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            if buffer is not None and getattr(self, name).dtype != buffer.dtype:
                setattr(self, name, buffer.to(getattr(self, name).device))
        if before["codes"].device != self.codes.device:
            self._stays_stored = False
            self.arrange()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if is_prepacked(self.stored_weight):
            weight = self.quantized_weight
            destination[f"{prefix}codes"], destination[f"{prefix}scale"] = weight.codes, weight.scale
            if weight.global_scale is None:
                destination.pop(f"{prefix}global_scale", None)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        held = self.stored_weight
        if is_prepacked(held):
            self._store(restore(held))
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._arranged = None
        if is_prepacked(held):
            self.arrange()
            now = self.stored_weight
            if now.codes.shape == held.codes.shape and now.codes.device == held.codes.device:
                # Into the same memory: captured graphs read it.
                held.codes.copy_(now.codes)
                held.scale.copy_(now.scale)
                if held.global_scale is not None and now.global_scale is not None:
                    held.global_scale.copy_(now.global_scale)
                self._store(held)

    def extra_repr(self) -> str:
        activation = self.activation_format or "16 bit"
        return f"{list(self.weight_shape)}, weight={self.weight_format}, activation={activation}"


def restore_layout(model: nn.Module) -> None:
    """Puts all weights of `model` in the layout of a checkpoint, for exporters; a forward arranges them again."""
    for module in model.modules():
        if isinstance(module, _QuantModule) and is_prepacked(module.stored_weight):  # looks for NaN, too
            module._store(restore(module.stored_weight))
            module._arranged = None


def _is_offloaded(module: nn.Module) -> bool:
    """Whether a hook of accelerate brings the weight to the device for each forward, and takes it away again."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))
    return any(getattr(each, "offload", False) and getattr(each, "offload_buffers", False) for each in hooks)


class QuantLinear(_QuantModule):
    """A linear layer over a quantized weight.

    Args:
        weight: `[out, in]`.
        bias: `[out]`, or None.
        activation: format the input is rounded to; None leaves it in 16 bit.
        input_scale: static scale of the activation format, float32 scalar, where the format has one.
        pre_scale, hadamard, lowrank: see `RunTimeParts`.
        dtype: of `weight` for code that reads it; `.to(dtype)` changes it.

    Raises:
        ValueError: one of them does not fit the weight.
    """

    bias: nn.Parameter | None
    pre_scale: torch.Tensor | None
    lowrank_down: torch.Tensor | None
    lowrank_up: torch.Tensor | None

    def __init__(
        self,
        weight: BlockScaledTensor,
        bias: torch.Tensor | None = None,
        activation: Format | None = None,
        input_scale: torch.Tensor | None = None,
        *,
        pre_scale: torch.Tensor | None = None,
        hadamard: int = 0,
        lowrank: tuple[torch.Tensor, torch.Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        RunTimeParts(pre_scale, hadamard, lowrank).check("QuantLinear", weight.shape)
        down, up = lowrank or (None, None)
        super().__init__(weight, activation, input_scale, pre_scale=pre_scale, lowrank_down=down, lowrank_up=up)
        self.out_features, self.in_features = weight.shape
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
        self.hadamard = hadamard
        self.dtype = dtype

    @property
    def weight(self) -> torch.Tensor:
        """The matrix `[out, in]` that the layer multiplies its input by, dequantized anew for each access.

        Modeling code reads the weight of some layers, for its dtype or to multiply by it without calling the layer;
        the input is then not rounded to the activation format.
        """
        weight = self.dequantize()
        if self.lowrank_down is not None and self.lowrank_up is not None:
            weight += self.lowrank_up.float() @ self.lowrank_down.float()
        if self.hadamard:  # a symmetric matrix that is its own inverse: (x H) Wᵀ = x (W H)ᵀ
            weight = hadamard_transform(weight, self.hadamard)
        if self.pre_scale is not None:
            weight = weight * self.pre_scale.float()
        return weight.to(self.dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantLinear:
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    @property
    def parts(self) -> RunTimeParts:
        """The run-time work in addition to the matmul, sharing the module's buffers."""
        lowrank = None
        if self.lowrank_down is not None and self.lowrank_up is not None:
            lowrank = (self.lowrank_down, self.lowrank_up)
        return RunTimeParts(self.pre_scale, self.hadamard, lowrank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`, in the dtype of `x`."""
        # Reading a buffer as an attribute is one more Python call before the launch.
        buffers = self._buffers
        codes = buffers["codes"]
        assert codes is not None
        if (codes.device, codes.dtype, x.dtype) != self._arranged:
            self.arrange(x.dtype)
        if x.shape[-1] != self.in_features:
            raise ValueError(f"input {list(x.shape)} does not fit a weight of {list(self.weight_shape)} [out, in]")
        parts = None
        if self.hadamard or buffers["pre_scale"] is not None or buffers["lowrank_down"] is not None:
            parts = self.parts
            x = parts.input(x)
        activation = self.activation_format
        y: torch.Tensor = torch.ops.quant.linear.default(
            x,
            buffers["codes"],
            buffers["scale"],
            buffers["global_scale"],
            self._parameters["bias"],
            buffers["input_scale"],
            self.weight_format.name,
            "" if activation is None else activation.name,
        )
        branch = None if parts is None else parts.branch(x)
        return y if branch is None else y + branch

    def extra_repr(self) -> str:
        words = [super().extra_repr()]
        if self.pre_scale is not None:
            words.append("pre_scale")
        if self.hadamard:
            words.append(f"hadamard={self.hadamard}")
        if self.lowrank_down is not None:
            words.append(f"rank={self.parts.rank}")
        return ", ".join(words)


class QuantExperts(_QuantModule, ExpertStack):
    """The quantized weights of all experts of one projection, in place of the parameter that stacks them.

    Args:
        weight: `[experts, out, in]`.
        activation: format the input is rounded to; None leaves it in 16 bit.
        input_scale: static scale of the activation format, float32 scalar, where the format has one.
        dtype: of dequantized values; `.to(dtype)` changes it.
        stacking: how the parameter holds the matrices; by default `[experts, out, in]`.
    """

    runs_grouped = True
    _dtype: torch.Tensor

    def __init__(
        self,
        weight: BlockScaledTensor,
        activation: Format | None = None,
        input_scale: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        stacking: Stacking | None = None,
    ) -> None:
        super().__init__(weight, activation, input_scale)
        self.register_buffer("_dtype", torch.empty(0, dtype=dtype), persistent=False)
        self.stacking = stacking or Stacking(tuple(weight.shape), weight.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that indexing gives: `float32` unless `.to(dtype)` said otherwise."""
        return self._dtype.dtype

    def _settle(self, x: torch.Tensor) -> None:
        if (self.codes.device, self.codes.dtype, x.dtype) != self._arranged:
            self.arrange(x.dtype)

    def __getitem__(self, index: int | torch.Tensor) -> Any:
        """One expert as the parameter holds it, or several. Without rounded inputs, these are dequantized values."""
        if self.activation_format is None and not (isinstance(index, torch.Tensor) and index.dim()):
            return self.stacking.hold(self.dense(int(index)))
        return super().__getitem__(index)

    def dense(self, index: int) -> torch.Tensor:
        """The values `[out, in]` of one expert."""
        return as_stored(self.stored_weight.matrix(index)).dequantize(self.dtype)

    def product(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """`[tokens, in]` to `[tokens, out]` through expert `index`."""
        self._settle(x)
        return quantized_linear(x, self.stored_weight.matrix(index), None, self.input_scale, self.activation_format)

    def every(self, x: torch.Tensor) -> torch.Tensor:
        """`[experts, tokens, in]` to `[experts, tokens, out]`, each expert with its own tokens."""
        offsets = torch.arange(len(x) + 1, device=x.device, dtype=torch.int32) * x.shape[1]
        y: torch.Tensor = self.grouped(x.flatten(0, 1), offsets).unflatten(0, x.shape[:2])
        return y

    def grouped(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """`[tokens, in]`, sorted by expert, to `[tokens, out]`; rows of expert e are those from `offsets[e]` on."""
        self._settle(x)
        y = experts.grouped_linear(x, self.stored_weight, offsets, self.input_scale, self.activation_format)
        return self.stacking.outputs(y)


def experts_forward(
    self: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    observe: Callable[[str, int, torch.Tensor], None] | None = None,
    until: str | None = None,
) -> torch.Tensor:
    """Forward of a transformers experts module whose projections are `QuantExperts`.

    On a GPU all experts run in one grouped matmul a projection, elsewhere one at a time. Registered with transformers
    as the experts implementation "quant".

    Args:
        self: the experts module; its projections may also be plain parameters.
        hidden_states: `[tokens, hidden]`.
        top_k_index: expert of each token and slot, `[tokens, k]`; indices beyond the last expert are skipped.
        top_k_weights: routing weights, `[tokens, k]`.
        observe: called with (projection, expert, its input `[tokens, in]`) before each matmul, for calibration.
        until: the last projection to be observed; those from it on are not run, and the result means nothing.

    Returns:
        `[tokens, hidden]`.
    """
    first = "gate_up_proj" if self.has_gate else "up_proj"
    projections = (getattr(self, first), self.down_proj)
    if hidden_states.is_cuda and observe is None and all(getattr(p, "runs_grouped", False) for p in projections):
        return experts.experts_forward(self, hidden_states, top_k_index, top_k_weights)
    out = torch.zeros_like(hidden_states)

    def project(name: str, x: torch.Tensor, expert: int) -> torch.Tensor:
        if observe is not None:
            observe(name, expert, x)
        return _apply_expert(self, name, x, expert)

    with ExitStack() as stack:
        for projection in projections:
            if isinstance(projection, ExpertStack):
                stack.enter_context(projection.opened())
        for expert in top_k_index.unique().tolist():
            if expert >= self.num_experts:
                continue
            token, slot = torch.where(top_k_index == expert)
            if until == first and observe is not None:
                observe(first, expert, hidden_states[token])
                continue
            up = project(first, hidden_states[token], expert)
            up = self._apply_gate(up) if self.has_gate else self.act_fn(up)
            if until is not None and observe is not None:
                observe("down_proj", expert, up)
                continue
            down = project("down_proj", up, expert)
            if getattr(self, "has_post_expert_norm", False):
                down = self.post_expert_norm(down)
            out.index_add_(0, token, (down * top_k_weights[token, slot, None]).to(out.dtype))
    return out


def runs_experts_alone(module: nn.Module) -> bool:
    """Whether `experts_forward` does what the forward of a transformers experts module does."""
    return hasattr(module, "has_gate")


def _apply_expert(self: Any, name: str, x: torch.Tensor, expert: int) -> torch.Tensor:
    """One expert's matmul. A projection in 16 bit is a plain parameter, whose experts may be in their files still."""
    projection = getattr(self, name)
    if isinstance(projection, ExpertStack):
        y: torch.Tensor = projection(x, expert)
    else:
        weight = getattr(projection, "stored", projection)[expert].to(x.device, x.dtype)
        y = nn.functional.linear(x, weight.t() if getattr(self, "is_transposed", False) else weight)
    return y + getattr(self, f"{name}_bias")[expert].to(x.dtype) if getattr(self, "has_bias", False) else y
