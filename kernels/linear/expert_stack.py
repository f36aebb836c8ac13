"""An `ExpertStack` takes the place of the parameter in which a model holds the matrices of all experts.

It takes part in the products of the modeling code as the parameter would (`linear(x, P[e])`, `x @ P[e]`,
`bmm(x, P)`, and `x @ P.view(…)[e].T`), through `__torch_function__`. Each such product runs through `product`, which
may round its input. Anything else that is computed with a stack sees dequantized values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from quant.formats.stacking import Stacking

_PRODUCTS = ("matmul", "mm")


class ExpertStack(nn.Module):
    """The matrices of all experts in the place of their parameter; a subclass computes the products.

    Attributes:
        stacking: how the parameter holds them.
    """

    stacking: Stacking

    def product(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Maps `[tokens, in]` to `[tokens, out]` through the matrix of one expert."""
        raise NotImplementedError

    def dense(self, index: int) -> torch.Tensor:
        """Returns the values `[out, in]` of one expert."""
        raise NotImplementedError

    @property
    def multiplies_values(self) -> bool:
        """Whether `product` is a plain matmul by the values of `dense`."""
        return False

    def opened(self) -> AbstractContextManager[object]:
        """Lets a subclass keep the matrices of one forward pass while open."""
        return nullcontext()

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Returns `product`, its outputs in the order of the parameter's rows."""
        return self.stacking.outputs(self.product(x, index))

    def every(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[experts, tokens, in]` to `[experts, tokens, out]`, each expert with its own tokens."""
        return torch.stack([self(rows, index) for index, rows in enumerate(x)])

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter."""
        return torch.Size(self.stacking.shape)

    def tensor(self) -> torch.Tensor:
        """Returns the parameter with dequantized values."""
        return self.stacking.parameter(torch.stack([self.dense(index) for index in range(self.stacking.experts)]))

    def view(self, *shape: Any) -> ExpertStack:
        """Returns the stack itself: modeling code views a parameter of two dimensions as one of three to index it."""
        return self

    def transpose(self, first: int, second: int) -> TransposedStack:
        """Returns the stack for a `bmm`, which multiplies by the transpose of each matrix `[out, in]`."""
        if {first % 3, second % 3} != {1, 2} or self.stacking.transposed:
            raise TypeError(f"quantized experts are no tensor that can be transposed by ({first}, {second})")
        return TransposedStack(self)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int | torch.Tensor) -> Any:
        """Returns one expert, or the values of several, as the parameter holds them.

        One expert is an `ExpertMatrix` if products with it have to run through `product`, and else its values.
        """
        if isinstance(index, torch.Tensor) and index.dim():
            return torch.stack([self.stacking.hold(self.dense(int(i))) for i in index])
        if self.multiplies_values:
            return self.stacking.hold(self.dense(int(index)))
        return ExpertMatrix(self, int(index), self.stacking.transposed)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Llama 4 multiplies all experts in one `bmm`, by a parameter `[experts, in, out]`.
        if func is torch.bmm and isinstance(args[1], ExpertStack) and args[1].stacking.transposed:
            return args[1].every(args[0])
        return func(*(a.tensor() if isinstance(a, ExpertStack) else a for a in args), **(kwargs or {}))


class TransposedStack:
    """The transposes `[experts, in, out]` of a stack in modeling code, for `bmm` and no other function.

    Args:
        stack: the stack.
    """

    def __init__(self, stack: ExpertStack) -> None:
        self.stack = stack

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Inkling's shared experts. Dequantized values would leave inputs unrounded in any other function.
        if func is torch.bmm and isinstance(args[1], cls):
            return args[1].stack.every(args[0])
        raise TypeError(f"quantized experts take no part in {getattr(func, '__name__', func)}")


class ExpertMatrix:
    """The matrix of one expert in modeling code, which multiplies by it or by its transpose.

    Args:
        stack: the stack of all experts.
        index: the index of the expert.
        transposed: whether it is `[in, out]`.
    """

    def __init__(self, stack: ExpertStack, index: int, transposed: bool) -> None:
        self.stack, self.index, self.transposed = stack, index, transposed

    @property
    def T(self) -> ExpertMatrix:  # noqa: N802 -- as of a tensor
        """The transpose."""
        return ExpertMatrix(self.stack, self.index, not self.transposed)

    def tensor(self) -> torch.Tensor:
        """Returns dequantized values."""
        held = self.stack.stacking.hold(self.stack.dense(self.index))
        return held if self.transposed == self.stack.stacking.transposed else held.t()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        matrix = args[1] if len(args) > 1 else None
        if isinstance(matrix, cls) and isinstance(args[0], torch.Tensor):
            # `linear` by `[out, in]` and `matmul` by `[in, out]` are both x Wᵀ of the stored matrix.
            is_linear = func is nn.functional.linear and not matrix.transposed
            if is_linear or (getattr(func, "__name__", "") in _PRODUCTS and matrix.transposed):
                y = matrix.stack(args[0], matrix.index)
                bias = (kwargs or {}).get("bias", args[2] if len(args) > 2 else None)
                return y if bias is None else y + bias
        return func(*(a.tensor() if isinstance(a, cls) else a for a in args), **(kwargs or {}))
