"""The parameters that vLLM has loaded for a layer become a `BlockScaledTensor`, and the layer's again for our kernels.

vLLM merges sibling layers (q, k and v; gate and up) into one matrix and gives a kernel the parameters of the
checkpoint under names of its own. By then global scales are no longer reciprocals: checkpoints in the layouts of
compressed-tensors and of ModelOpt arrive alike.

    nvfp4   weight u8 [out, in / 2], weight_scale e4m3 [out, in / 16], weight_global_scale f32 scalar
    mxfp4   weight u8 [out, in / 2], weight_scale u8 [out, in / 32]
    mxfp8   weight e4m3 [out, in], weight_scale u8 [out, in / 32]
    int4    weight_packed i32 [out, in / 8], codes offset by 8, weight_scale in the model's dtype [out, in / 128]
    fp8     weight e4m3 [out, in], weight_scale f32 [out, 1], or one for each 128 × 128 block

Stacks of experts have an axis in front.

No function here imports vLLM.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quant.formats.format import E2M1, FORMATS
from quant.formats.rounding import encode
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.custom_ops import register
from quant.kernels.base.hardware import current
from quant.kernels.base.launch import reserve
from quant.kernels.base.weight_layout import is_prepacked, prepack, prepack_refusal
from quant.vllm_plugin.switches import switches

FP8_FROM, FP8_PRODUCTS = 192, 12 << 30
"""Tokens, and products of two numbers, from which a matmul is faster in FP8 than in 16 bit (8B, H100).

With fewer tokens both wait for the weight; with fewer products, rounding the inputs takes longer than is saved.
"""

FP8_DECODED_UP_TO = 1024
"""Tokens up to which one kernel decodes the weight; for more, the weight is written in E4M3 once, for the library."""


def nvfp4_weight(codes: Tensor, scale: Tensor, global_scale: Tensor) -> BlockScaledTensor:
    """Returns an NVFP4 weight `[out, in]`, or a stack of experts `[experts, out, in]` with a global scale each."""
    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    second = global_scale.float().reshape(codes.shape[:-2])
    return BlockScaledTensor(codes, scale, FORMATS["nvfp4"], shape, second)


def mxfp4_weight(codes: Tensor, scale: Tensor) -> BlockScaledTensor:
    """Returns an MXFP4 weight `[out, in]`, or a stack of experts `[experts, out, in]`."""
    return BlockScaledTensor(codes, scale, FORMATS["mxfp4"], (*codes.shape[:-1], codes.shape[-1] * 2))


def mxfp8_weight(codes: Tensor, scale: Tensor) -> BlockScaledTensor:
    """Returns an MXFP8 weight `[out, in]`."""
    return BlockScaledTensor(codes, scale, FORMATS["mxfp8"], tuple(codes.shape))


def int4_weight(words: Tensor, scale: Tensor) -> BlockScaledTensor:
    """Returns an INT4 weight `[out, in]` from words of eight codes along `in`, each offset by 8."""
    # Codes offset by 8 become two's complement when bit 3 of each nibble is flipped.
    codes = words.contiguous().view(torch.uint8) ^ 0x88
    return BlockScaledTensor(codes, scale.float().contiguous(), FORMATS["int4"], (codes.shape[0], codes.shape[1] * 2))


def fp8_weight(codes: Tensor, scale: Tensor, *, blocks: bool) -> BlockScaledTensor:
    """Returns an FP8 weight `[out, in]`, or a stack of experts, with a scale for each row or 128 × 128 block."""
    format = FORMATS["fp8_block" if blocks else "fp8_channel"]
    shape = tuple(codes.shape)
    return BlockScaledTensor(codes.contiguous(), scale.float().reshape(format.scale_shape(shape)), format, shape)


def fp8_experts_weight(codes: Tensor, scale: Tensor) -> BlockScaledTensor:
    """Returns FP8 experts `[experts, out, in]` with a scale for each row.

    vLLM's scale is `[experts, out, 1]`, or one for each matrix that was joined into an expert's, `[experts, matrices]`
    or `[experts]`.
    """
    experts, rows, _ = codes.shape
    if scale.dim() < 3:
        # Gate and up have as many rows each.
        scale = scale.reshape(experts, -1)
        scale = scale.repeat_interleave(rows // scale.shape[1], 1)
    return fp8_weight(codes, scale, blocks=False)


def arranged(weight: BlockScaledTensor) -> tuple[BlockScaledTensor, str]:
    """Returns `weight` in the layout of this GPU's fastest kernel; or unchanged, with the reason for having none.

    A format that kernels read in the order of the checkpoint is unchanged, too, without a reason. The buffers in which
    kernels count arrivals are made here too, because they must exist before a CUDA graph is captured.
    """
    # Memory that is allocated during a capture belongs only to that graph, and memory of a server that slept holds
    # anything when it wakes and loads its weights again.
    reserve(weight.codes, again=True)
    if weight.format.element is not E2M1:
        return weight, ""
    reason = prepack_refusal(weight)
    return (weight, reason) if reason else (prepack(weight), "")


def arranged_as_before(weight: BlockScaledTensor, fitted: bool | None, name: str) -> tuple[BlockScaledTensor, str]:
    """Returns `arranged`, for weights that a server may load into the memory of earlier ones of the same layer.

    The layer's kernel was chosen for the first weights, and CUDA graphs call it: later ones keep its layout. `fitted`
    says whether the first weights fitted the layout of our kernels; None if these are the first. ValueError says that
    the first weights fitted, and these do not.
    """
    if fitted is False:
        reserve(weight.codes, again=True)
        return weight, "the first weights of the layer did not fit our kernel, and later ones are put into their memory"
    arranged_weight, reason = arranged(weight)
    if fitted and reason:
        raise ValueError(
            f"{name}: the weights that were loaded anew do not fit the layout of the first ones, which CUDA graphs "
            f"read: {reason}; start vLLM with these weights, or with BLOCKSCALE_VLLM=0"
        )
    return arranged_weight, reason


def placeholder(weight: BlockScaledTensor) -> BlockScaledTensor:
    """Returns `weight` with block scales of 1.

    Made-up scales are negative or zero, which the layout of our kernels does not hold. The layer would go to another
    kernel, and the real weights could not be loaded into its parameters.
    """
    if weight.format.element is not E2M1:
        return weight
    ones = encode(torch.ones(weight.scale.shape, device=weight.scale.device), weight.format.scale)
    return replace(weight, scale=ones.view(torch.uint8).view(weight.scale.dtype))


def portable_experts_reason(weight: BlockScaledTensor) -> str:
    """Returns why only the portable kernel takes a stack of experts on a GPU; empty if Hopper's does."""
    if is_prepacked(weight) or not weight.codes.is_cuda:
        return ""
    from quant.kernels.linear.sm90_codes_gemm_many import takes_experts

    # It looks for codes that are no numbers, and keeps the result: nothing may wait while a CUDA graph is captured.
    if takes_experts(weight, current(weight.codes.device.index or 0)):
        return ""
    return f"{list(weight.shape)} in {weight.format} has sizes or codes that Hopper's kernel does not read"


def dtype_refusal(dtype: torch.dtype) -> str:
    """Returns why a model in `dtype` cannot have our kernels, empty if it can."""
    return "" if dtype is torch.bfloat16 else f"our kernels take inputs in bfloat16, not in {dtype}"


def hold(layer: Any, weight: BlockScaledTensor, codes: str = "weight") -> None:
    """Makes `weight` the parameters of a server's layer, its codes under the name `codes`, in the place of its own."""
    tensors = {codes: weight.codes, "weight_scale": weight.scale, "weight_global_scale": weight.global_scale}
    for name, tensor in tensors.items():
        if hasattr(layer, name):
            delattr(layer, name)
        # A parameter of None where the format has no global scale, because `multiply` reads all three names.
        parameter = None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)
        layer.register_parameter(name, parameter)
    layer.blockscale_format = weight.format.name


def multiply(layer: Any, x: Tensor, bias: Tensor | None, codes: Tensor) -> Tensor:
    """Returns `x @ weight.T + bias`, `[..., out]`, with the parameters that `hold` has left."""
    scale, second, format = layer.weight_scale, layer.weight_global_scale, layer.blockscale_format
    if multiplies_prompts_in_fp8(format):
        return torch.ops.quant.linear_fp8_prefill(x, codes, scale, second, bias, format)
    return torch.ops.quant.linear(x, codes, scale, second, bias, None, format, "")


def multiplies_prompts_in_fp8(format: str) -> bool:
    """Returns whether layers in a format multiply many tokens at once in FP8: the user asked for it."""
    return format == "nvfp4" and "fp8-prefill" in switches()


def is_faster_in_fp8(tokens: int, shape: tuple[int, ...]) -> bool:
    """Returns whether a matmul of so many tokens by a weight `[out, in]` gains more from FP8 than rounding costs."""
    return tokens >= FP8_FROM and tokens * shape[0] * shape[1] >= FP8_PRODUCTS


def _linear_fp8_prefill(
    x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None, bias: Tensor | None, weight_format: str
) -> Tensor:
    # The number of tokens is known here, inside the op, and not to torch.compile, whose graph serves any number.
    rows, columns = codes.shape[0], x.shape[-1]
    tokens = x.numel() // columns
    if is_faster_in_fp8(tokens, (rows, columns)):
        weight = BlockScaledTensor(codes, scale, FORMATS[weight_format], (rows, columns), global_scale)
        return multiply_in_fp8(x, weight, bias)
    return torch.ops.quant.linear(x, codes, scale, global_scale, bias, None, weight_format, "")


def multiply_in_fp8(x: Tensor, weight: BlockScaledTensor, bias: Tensor | None) -> Tensor:
    """Returns `x @ weight.T + bias` with x rounded to E4M3, a scale a token; on a GPU W is rounded to E4M3 as well."""
    rows = x.reshape(-1, x.shape[-1])
    if x.is_cuda and len(rows) <= FP8_DECODED_UP_TO and is_prepacked(weight):
        from quant.kernels.linear.sm90_e4m3_rows import multiply_in_e4m3

        return multiply_in_e4m3(rows.contiguous(), weight, bias).view(*x.shape[:-1], -1)
    return torch.ops.quant.linear(
        x, weight.codes, weight.scale, weight.global_scale, bias, None, weight.format.name, "fp8_token"
    )


register(
    "quant::linear_fp8_prefill",
    "(Tensor x, Tensor codes, Tensor scale, Tensor? global_scale, Tensor? bias, str weight_format) -> Tensor",
    lambda x, codes, *_: x.new_empty(*x.shape[:-1], codes.shape[0]),
    default=_linear_fp8_prefill,
)
