"""The fast Hadamard transform agrees with scipy's matrix and has the algebra that its users rely on."""

import numpy as np
import pytest
import scipy.linalg
import torch

from quant.kernels.rounding.hadamard import hadamard_block, hadamard_transform


@pytest.mark.parametrize("n", [1, 2, 4, 64, 128, 512])
def test_equals_the_matrix(n: int) -> None:
    x = torch.randn(3, 5, n, dtype=torch.float64)
    expected = x.numpy() @ scipy.linalg.hadamard(n) / np.sqrt(n)
    np.testing.assert_allclose(hadamard_transform(x).numpy(), expected, rtol=0, atol=1e-14 * n)


@pytest.mark.parametrize(("n", "block"), [(96, 32), (80, 16), (7, 1), (1536, 512)])
def test_other_lengths_are_rotated_in_blocks(n: int, block: int) -> None:
    x = torch.randn(4, n, dtype=torch.float64)
    matrix = scipy.linalg.block_diag(*[scipy.linalg.hadamard(block) / np.sqrt(block)] * (n // block))
    assert hadamard_block(n) == block
    np.testing.assert_allclose(hadamard_transform(x).numpy(), x.numpy() @ matrix, rtol=0, atol=1e-12)


def test_a_block_can_be_chosen() -> None:
    x = torch.randn(4, 64, dtype=torch.float64)
    matrix = scipy.linalg.block_diag(*[scipy.linalg.hadamard(16) / 4] * 4)
    np.testing.assert_allclose(hadamard_transform(x, 16).numpy(), x.numpy() @ matrix, rtol=0, atol=1e-13)


def test_is_its_own_inverse_and_keeps_inner_products() -> None:
    x, y = torch.randn(2, 10, 96, dtype=torch.float64)
    torch.testing.assert_close(hadamard_transform(hadamard_transform(x)), x, rtol=0, atol=1e-13)
    inner = hadamard_transform(x) @ hadamard_transform(y).T
    torch.testing.assert_close(inner, x @ y.T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounds_once_to_the_dtype(dtype: torch.dtype) -> None:
    # Integers up to 256 and n = 64 = 8²: sums and their division by 8 are exact in float32.
    x = torch.randint(-256, 257, (20, 64)).to(dtype)
    exact = x.double().numpy() @ scipy.linalg.hadamard(64) / 8
    assert torch.equal(hadamard_transform(x), torch.from_numpy(exact).to(dtype))


def test_gradient_is_the_transform_itself() -> None:
    x = torch.randn(2, 24, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 24, dtype=torch.float64)
    (hadamard_transform(x) * weight).sum().backward()
    torch.testing.assert_close(x.grad, hadamard_transform(weight), rtol=0, atol=1e-14)


@pytest.mark.parametrize("block", [0, 3, 64, -2])
def test_an_impossible_block_is_refused(block: int) -> None:
    with pytest.raises(ValueError, match=r"which is 96; the largest is 32"):
        hadamard_transform(torch.ones(2, 96), block)
