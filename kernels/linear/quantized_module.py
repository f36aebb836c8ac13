"""`QuantizedModule` holds the codes and scales of one quantized weight as buffers and lays them out for the kernels.

`model.float()`, `.half()` and `.to(dtype)` cast the floating-point tensors of a module, and FP8 counts as floating
point, so `_apply` is overridden: codes and scales follow the module to a device and never change their dtype.

On a Hopper GPU a weight takes the layout of the fastest kernel (`kernels/base/weight_layout.py`) when the module
arrives there by `.to` or `.cuda`, and otherwise at its first forward, because tools such as accelerate move tensors one
by one. That layout is for inputs in BF16; a module that gets inputs of another dtype returns to the checkpoint's
layout. `state_dict` returns the checkpoint's layout and `load_state_dict` takes it, bit for bit, on any device. Its
tensors are the layer's own memory where the layer has the checkpoint's layout, and copies for reading elsewhere.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from quant.formats.finite import is_finite
from quant.formats.format import E3M2, Format
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.custom_ops import autocast_dtype, is_traced
from quant.kernels.base.launch import reserve
from quant.kernels.base.weight_layout import (
    becomes_e4m3,
    is_prepacked,
    prefers_prepacked,
    prepack,
    prepack_refusal,
    restore,
)
from quant.kernels.linear.oracle import note_lasting

_EXACT = ("codes", "scale", "global_scale", "input_scale")
# A thread whose forward finds another thread arranging the weight waits for the three tensors to change together.
_arranging = threading.RLock()


class QuantizedModule(nn.Module):
    """Buffers of one quantized weight, safe from dtype casts."""

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None
    input_scale: Tensor | None
    has_kernel_layout = True

    def __init__(
        self,
        weight: BlockScaledTensor,
        activation: Format | None = None,
        input_scale: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        **parts: Tensor | None,
    ) -> None:
        super().__init__()
        self.weight_format = weight.format
        self.activation_format = activation
        self.weight_shape = weight.shape
        self.dtype = dtype  # of dequantized values, for code that reads them; `.to(dtype)` changes it
        exact = (weight.codes, weight.scale, weight.global_scale, input_scale)
        buffers = {**dict(zip(_EXACT, exact, strict=True)), **parts}
        # Buffers that are None come last: torch.export counts a module's buffers with them and names without.
        for name in sorted(buffers, key=lambda name: buffers[name] is None):
            self.register_buffer(name, buffers[name])
        note_lasting(weight.codes)  # codes of a loaded checkpoint are views of its mapped file
        # Buffers for arrival counts must exist before a CUDA graph is captured, which is long after this.
        reserve(weight.codes)
        # Device and dtype of the codes, and dtype of the input, that the layout was last decided for.
        self._arranged: tuple[torch.device, torch.dtype, torch.dtype] | None = None
        self._stays_stored = False
        self._unread: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        # pickle, as Ray and joblib call it, writes tensors in FP8 that PyTorch cannot read again (2.11 to 2.15).
        buffers: dict[str, Any] = dict(self._buffers)
        for name, x in self._buffers.items():
            if x is not None and type(x) is Tensor and x.is_floating_point() and x.itemsize == 1:
                buffers[name] = (x.view(torch.uint8), x.dtype)
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "_buffers": buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        buffers = {name: x[0].view(x[1]) if type(x) is tuple else x for name, x in state["_buffers"].items()}
        super().__setstate__({**state, "_buffers": buffers})  # type: ignore[no-untyped-call]

    def check_at_first_use(self, tensor: str) -> None:
        """Notes that the codes are still to be searched for NaN; `tensor` names them in the error."""
        # Files are mapped, so that loading reads no codes. The search waits until the weight is read for another
        # reason: it arrives at a GPU, is arranged for its first forward, or is written.
        if self.codes.is_floating_point():  # only codes of FP8 may be NaN
            self._unread = tensor

    def _check_codes(self) -> None:
        codes = self.codes
        if type(codes) is not Tensor or codes.is_meta or is_traced():
            return
        if not is_finite(codes):
            wrong = int((~codes.float().isfinite()).sum())
            raise ValueError(
                f"{self._unread} holds {wrong:,} codes that are NaN or infinite; repair the model, or download it again"
            )
        self._unread = None

    @property
    def stored_weight(self) -> BlockScaledTensor:
        """The weight as the buffers hold it: perhaps in the layout of a kernel (`kernels/base/weight_layout.py`)."""
        if self._unread is not None:
            self._check_codes()
        return BlockScaledTensor(self.codes, self.scale, self.weight_format, self.weight_shape, self.global_scale)

    @property
    def quantized_weight(self) -> BlockScaledTensor:
        """The weight in the layout of a checkpoint, sharing the module's buffers unless they are prepacked."""
        weight = self.stored_weight
        return restore(weight) if is_prepacked(weight) else weight

    @property
    def qweight(self) -> Tensor:
        """The codes, by the name under which PEFT looks for the device of a quantized layer."""
        return self.codes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the weight's values, `[..., out, in]`."""
        return self.quantized_weight.dequantize(dtype)

    def arrange(self, dtype: torch.dtype = torch.bfloat16) -> None:
        """Puts the weight in the layout that is fastest for inputs of `dtype` where it is now."""
        # Not while it is traced, nor while a CUDA graph is captured, whose kernels keep the addresses of its weights,
        # nor where accelerate copies it from the CPU for each forward.
        codes = self.codes
        if type(codes) is not Tensor or codes.is_meta or is_traced():
            return
        if self.weight_format.element is E3M2 and codes.dtype is torch.int8:  # of a state dict, by `functional_call`
            self.codes = codes = codes.view(torch.uint8)
        computed = autocast_dtype(codes) or dtype
        # Weights made in inference mode would be of no use to a later backward pass.
        with _arranging, torch.inference_mode(False):
            if not (codes.is_cuda and torch.cuda.is_current_stream_capturing()):
                reserve(codes)
                weight = self.stored_weight
                on_hopper = prefers_prepacked(codes)
                suits = self.has_kernel_layout and on_hopper and not weight.format.gguf
                suits &= computed is torch.bfloat16 or becomes_e4m3(weight.format)
                if is_prepacked(weight) and not suits:
                    self._store(restore(weight))
                    # A model that sees several dtypes does not change back and forth.
                    self._stays_stored = on_hopper
                elif suits and not (is_prepacked(weight) or self._stays_stored):
                    # Not where a hook of accelerate brings the weight to the device for each forward pass.
                    hook = getattr(self, "_hf_hook", None)
                    hooks = getattr(hook, "hooks", (hook,))
                    offloads = any(getattr(h, "offload", False) and getattr(h, "offload_buffers", False) for h in hooks)
                    if not offloads and (packed := self.packed(weight)) is not None:
                        self._store(packed)
            self._arranged = (self.codes.device, self.codes.dtype, dtype)

    def packed(self, weight: BlockScaledTensor) -> BlockScaledTensor | None:
        """Returns the weight in the layout of a kernel for inputs in BF16; None if there is none."""
        return None if prepack_refusal(weight) else prepack(weight)

    def take(self, weight: BlockScaledTensor) -> None:
        """Replaces the weight by the same values, perhaps in a kernel's layout, or in a view of a larger tensor."""
        with _arranging:
            self._store(weight)
            self._arranged = None

    def _store(self, weight: BlockScaledTensor) -> None:
        if weight.codes.is_cuda:
            # The old tensors return to the allocator below, which hands them out again on this stream.
            # Other streams may still read the memory freed here, and will read tensors that this stream has written.
            torch.cuda.synchronize(weight.codes.device)
        self.codes, self.scale, self.global_scale = weight.codes, weight.scale, weight.global_scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `fn` may cast and move at once (`.to(device, dtype)`), so dtypes are restored on the device where it put them.
        before = {name: getattr(self, name) for name in _EXACT}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            if buffer is not None and getattr(self, name).dtype != buffer.dtype:
                setattr(self, name, buffer.to(getattr(self, name).device))
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        if before["codes"].device != self.codes.device:
            self._stays_stored = False
            self.arrange()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if is_prepacked(self.stored_weight):
            # Not the layer's memory, as a state dict's tensors are elsewhere. PyTorch refuses to write into tensors of
            # this mode, so that averages (EMA) which are put in through a state dict do not get lost without a word.
            with torch.inference_mode():
                weight = self.quantized_weight
            destination[f"{prefix}codes"], destination[f"{prefix}scale"] = weight.codes, weight.scale
            if weight.global_scale is None:
                destination.pop(f"{prefix}global_scale", None)
        if self.weight_format.element is E3M2:
            codes = destination[f"{prefix}codes"]
            with torch.inference_mode(codes.is_inference()):
                destination[f"{prefix}codes"] = codes.view(torch.int8)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        if f"{prefix}weight" in state_dict and f"{prefix}codes" not in state_dict:
            # With strict=False it would be passed over, and the old codes would stay without a word.
            arguments[-1].append(
                f"{prefix}weight is a weight in 16 bit, and the layer holds codes in {self.weight_format}: quantize a "
                "model that has the new weights, by the same plan, and load its state_dict()"
            )
        held = self.stored_weight
        if is_prepacked(held):
            self._store(restore(held))
        # The two kinds of MXFP6 have the same shapes. In a state dict int8, a view of the same bits, says E3M2.
        codes = torch.int8 if self.weight_format.element is E3M2 else self.codes.dtype
        for name, dtype in (("codes", codes), ("scale", self.scale.dtype)):
            # Of another format; PyTorch would cast the numbers, and -0.4 in FP8 would be the code 0 in INT8.
            if (given := state_dict.get(f"{prefix}{name}")) is not None and given.dtype is not dtype:
                arguments[-1].append(
                    f"{prefix}{name} is in {given.dtype}, and {self.weight_format} has {dtype}: load it into a "
                    "model that was quantized by the same plan"
                )
        if codes is not self.codes.dtype and f"{prefix}codes" in state_dict:
            state_dict = {**state_dict, f"{prefix}codes": state_dict[f"{prefix}codes"].view(self.codes.dtype)}
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self._arranged = None
        if is_prepacked(held):
            self.arrange()
            # A CUDA graph holds addresses: new values must lie where the old ones lay, in the same layout.
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
        if isinstance(module, QuantizedModule) and is_prepacked(module.stored_weight):  # looks for NaN, too
            module._store(restore(module.stored_weight))
            module._arranged = None
