"""NVFP4 rounding on a GPU agrees with PyTorch: GPTQ's window, `formats` and autograd; a CPU interprets the kernels."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from interpreter import interpreted

from quant.calibration.solvers.autoround import _Rounded, _spread
from quant.calibration.solvers.gptq import (
    Gptq,
    Rounding,
    block_factors,
    compile_ahead,
    corrected_weight,
    factorize,
    gptq_together,
    search_block,
    solve_window,
)  # fmt: skip
from quant.calibration.solvers.solve_group import solve_group, solve_matrices
from quant.calibration.statistics import LayerStats
from quant.formats.format import E4M3, FORMATS, INPUT_FORMATS
from quant.formats.rounding import round_to
from quant.formats.tensor import fake_quantize
from quant.kernels.rounding.portable_solvers import (
    fake_quantize_nvfp4,
    learned_gradient,
    learned_values,
    nvfp4_solve_kernel,
    search_nvfp4_blocks,
    solve_nvfp4_window,
)

NVFP4, FOUR_OR_SIX = FORMATS["nvfp4"], INPUT_FORMATS["nvfp4_four_over_six"]
SECOND = 0.002


def _problem(blocks: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wanted = torch.randn(16 * blocks, columns, dtype=torch.float64)
    wanted *= torch.logspace(-3, 0, columns, dtype=torch.float64)
    wanted[:16, 0] = 0
    mixing = torch.randn(blocks, 16, 16, dtype=torch.float64)
    _, uppers = block_factors(mixing @ mixing.mT + 0.1 * torch.eye(16))
    coupling = torch.randn(16 * blocks, 16 * blocks, dtype=torch.float64) * 0.05
    return wanted.float(), coupling.float(), uppers.float()


def _losses(off: torch.Tensor, uppers: torch.Tensor) -> torch.Tensor:
    """Σ e² of each block and row, in float64."""
    errors = torch.linalg.solve_triangular(uppers.double().mT, off.double().unflatten(0, (-1, 16)), upper=False)
    return errors.square().sum(1)


def _check_window(device: str) -> None:
    columns = 5000 if device == "cuda" else 40
    wanted, coupling, uppers = _problem(3, columns)
    second = torch.tensor(SECOND)
    gpu = [t.to(device) for t in (second, wanted, coupling, uppers)]
    solve = partial(solve_window, lambda block, start, u, _: search_block(block, u, NVFP4, second, 16), None)

    def both(found: list[torch.Tensor], improve: bool) -> list[list[torch.Tensor]]:
        answers = []
        for run, tensors in ((solve, (wanted, coupling, uppers)), (partial(solve_nvfp4_window, gpu[0]), gpu[1:])):
            values, scales = (t.clone().to(tensors[0].device) for t in found)
            moves = run(*tensors, values, scales, 0, improve)
            answers.append([t.cpu() for t in (values, scales, moves)])
        return answers

    # The first pass: values, scales and errors. A row in which two scales are as good may go another way.
    empty = [torch.zeros_like(wanted), torch.zeros(3, columns)]
    (values, scales, errors), (our_values, our_scales, our_errors) = both(empty, False)
    same = (scales == our_scales).all(0)
    assert same.float().mean() > 0.95
    torch.testing.assert_close(our_values[:, same], values[:, same], rtol=1e-6, atol=0)
    torch.testing.assert_close(our_errors[:, same], errors[:, same], rtol=1e-3, atol=1e-5)
    by_errors = errors[:16].double().square().sum(0)[None]
    torch.testing.assert_close(_losses(wanted[:16] - our_values[:16], uppers[:1]), by_errors, rtol=1e-4, atol=1e-12)
    # Descent: what is there stays where it is better, and the moves say what changed.
    start = [values + 0.3 * torch.randn_like(values) * (torch.rand(columns) < 0.5), scales]
    (values, scales, _), (our_values, our_scales, our_moves) = both(start, True)
    same = (scales == our_scales).all(0)
    assert same.float().mean() > 0.95
    torch.testing.assert_close(our_values[:, same], values[:, same], rtol=1e-6, atol=0)
    torch.testing.assert_close(our_moves, our_values - start[0], rtol=0, atol=0)
    assert (our_values == start[0]).all(0).any(), "no row was kept"
    assert set(our_scales.flatten().tolist()) <= set(E4M3.grid().tolist())
    # Blocks on their own.
    alone, alone_scales = search_nvfp4_blocks(gpu[1], gpu[3], gpu[0])
    for block in range(3):
        here = slice(16 * block, 16 * block + 16)
        best, _, _ = search_block(wanted[here], uppers[block], NVFP4, second, 16)
        ours = _losses(wanted[here] - alone[here].cpu(), uppers[block : block + 1])
        torch.testing.assert_close(ours, _losses(wanted[here] - best, uppers[block : block + 1]), rtol=1e-5, atol=1e-12)
    assert alone_scales.shape == (3, columns)


def _check_inputs(device: str) -> None:
    x = torch.randn(70, 96) * torch.logspace(-7, 3, 70)[:, None]
    x[3, 16:32] = 0
    for dtype in (torch.float32, torch.bfloat16):
        # The second scale is too small for the largest blocks: scales saturate.
        for second in (None, torch.tensor(0.002)):
            given = x.to(dtype)
            found = fake_quantize_nvfp4(given.to(device), None if second is None else second.to(device))
            assert torch.equal(found.cpu(), fake_quantize(given, NVFP4, global_scale=second))
            found = fake_quantize_nvfp4(given.to(device), None if second is None else second.to(device), FOUR_OR_SIX)
            expected = fake_quantize(given, FOUR_OR_SIX, global_scale=second)
            # Of two scales whose errors differ by the order of a sum alone, either may be chosen.
            blocks = [t.double().unflatten(-1, (-1, 16)) for t in (found.cpu(), expected, given)]
            errors = [(rounded - blocks[2]).square().sum(-1) for rounded in blocks[:2]]
            torch.testing.assert_close(errors[0], errors[1], rtol=1e-5, atol=0)
            assert (found.cpu() == expected).double().mean() > 0.99


def _check_weights(device: str) -> None:
    latent = torch.randn(40, 64) * 3
    first, step = torch.rand(40, 4) + 0.5, torch.rand(40, 4) + 0.5
    gradient = torch.randn(40, 64)
    # By autograd, as the definition says: rounding is passed through, saturation is not.
    free_latent, free_step = latent.clone().requires_grad_(), step.clone().requires_grad_()
    spread = _spread(free_step, latent.shape, NVFP4)
    wanted = (free_latent * _spread(first, latent.shape, NVFP4) / spread).clamp(-6, 6)
    values = (wanted + (round_to(wanted.detach(), NVFP4.element) - wanted).detach()) * spread
    values.backward(gradient)
    on = [t.to(device) for t in (latent, first, step)]
    torch.testing.assert_close(learned_values(*on).cpu(), values.detach())
    of_latent, of_step = learned_gradient(*on, gradient.to(device))
    torch.testing.assert_close(of_latent.cpu(), free_latent.grad)
    torch.testing.assert_close(of_step.cpu(), free_step.grad, rtol=1e-4, atol=1e-5)
    # The same without the kernel.
    ours, our_step = latent.clone().requires_grad_(), step.clone().requires_grad_()
    _Rounded.apply(ours, our_step, first, NVFP4).backward(gradient)
    torch.testing.assert_close(ours.grad, free_latent.grad)
    torch.testing.assert_close(our_step.grad, free_step.grad, rtol=1e-4, atol=1e-5)


CHECKS = pytest.mark.parametrize("check", [_check_window, _check_inputs, _check_weights])


@CHECKS
def test_interpreted(check: Callable[[str], None]) -> None:
    with interpreted():
        check("cpu")


@pytest.mark.gpu
@CHECKS
def test_compiled(check: Callable[[str], None]) -> None:
    check("cuda")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_several_weights_are_solved_in_the_launches_of_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """144 inputs are a window and one block more. A CPU interprets the kernel."""
    random, rows = torch.Generator().manual_seed(0), 2 if device == "cpu" else 24
    weights = [torch.randn(rows, 144, generator=random).to(device) for _ in range(2)]
    inputs = [torch.randn(400, 144, generator=random) * torch.logspace(-1, 0, 144) for _ in weights]
    residual = 0.01 * torch.randn(rows, 144, generator=random)
    stats = [LayerStats(400, (x.T @ x / 400).to(device), residual=residual.to(device)) for x in inputs]
    monkeypatch.setattr(Gptq, "batches_small", lambda *_: True)
    solve = partial(solve_matrices, weights, stats, NVFP4, Gptq(), torch.bfloat16, "experts")
    with interpreted() if device == "cpu" else nullcontext():
        together = list(solve())
        monkeypatch.setattr("quant.calibration.solvers.solve_group.TOGETHER", 1)
        alone = list(solve())
    for weight, each, ours, theirs in zip(weights, stats, together, alone, strict=True):
        assert ours.global_scale is not None and theirs.global_scale is not None
        assert torch.equal(ours.global_scale, theirs.global_scale)
        assert (ours.codes == theirs.codes).float().mean() > 0.98
        # The solver for one weight on a CPU has no kernel, and tries fewer scales.
        on_cpu = LayerStats(400, each.matrix.cpu(), residual=residual)
        by_cpu = solve_group({"a": weight.cpu()}, {"a": on_cpu}, NVFP4, Gptq())["a"]
        target = corrected_weight(weight.cpu(), None, factorize(on_cpu.matrix), residual)
        errors = [w.dequantize().cpu() - target for w in (ours, theirs, by_cpu)]
        losses = [float(((error @ on_cpu.matrix) * error).sum()) for error in errors]
        assert losses[0] == pytest.approx(losses[1], rel=0.02) and losses[0] < 1.05 * losses[2]


def test_all_weights_are_solved_by_the_kernels_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles for 4 s by dtypes, and by whether integers are 1 or multiples of 16."""
    launches: dict[bool, set[tuple[Any, ...]]] = {False: set(), True: set()}

    def kind(argument: Any) -> Any:
        return argument.dtype if isinstance(argument, torch.Tensor) else (argument == 1, argument % 16 == 0)

    def solver(programs: int, windows: int, weights: int, improve: bool) -> Callable[..., None]:
        return lambda *arguments: launches[improve].add(tuple(map(kind, arguments)))

    monkeypatch.setattr("quant.kernels.rounding.portable_solvers._solver", solver)
    factors = [factorize(torch.eye(256)) for _ in range(2)]
    with monkeypatch.context() as large:  # factorized by blocks
        for name in ("_LEAF", "_WHOLE"):
            large.setattr(f"quant.calibration.solvers.gptq.{name}", 64)
        large.setattr("quant.calibration.solvers.gptq.has_pairs", lambda x: True)
        large.setattr("quant.calibration.fast_matmul._of_columns", lambda x, y, total, factor: total)
        factors.append(factorize(torch.eye(256)))
    monkeypatch.setattr("quant.calibration.solvers.gptq.encoded", lambda *_: None)
    gptq_together([torch.randn(32, 256)] * 2, factors[:2], NVFP4, torch.ones(2))
    parts, kernel = [slice(0, 32), slice(32, 64)], partial(solve_nvfp4_window, torch.ones(()))
    for factor in factors:
        rounding = Rounding(torch.randn(256, 64), factor, NVFP4, None, 4, parts=parts, kernel=kernel)
        rounding.feed_back()
        rounding.descend()
    assert [len(kinds) for kinds in launches.values()] == [1, 1]


@pytest.mark.gpu
def test_kernels_that_were_compiled_ahead_are_those_of_gptq() -> None:
    compile_ahead([NVFP4], torch.device("cuda", 0))
    for thread in threading.enumerate():
        if thread.name == "compile":
            thread.join()
    compiled = nvfp4_solve_kernel.device_caches[0][0]
    before = len(compiled)
    weight, stats = torch.randn(64, 256, device="cuda"), LayerStats(256, torch.eye(256, device="cuda"))
    solve_group({"a": weight}, {"a": stats}, NVFP4, Gptq())
    assert before and len(compiled) == before


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "fp8", "fp8_channel", "fp8_block"])
def test_gradients_of_every_block_shape(name: str) -> None:
    format = FORMATS[name]
    latent = torch.randn(40, 70)
    step = torch.rand(format.scale_shape((40, 70))) + 0.5
    ours, our_step = latent.clone().requires_grad_(), step.clone().requires_grad_()
    gradient = torch.randn(40, 70)
    _Rounded.apply(ours, our_step, step, format).backward(gradient)
    spread = _spread(step, latent.shape, format)
    nearest = round_to(latent, format.element)
    free = latent.abs() <= format.element.max
    torch.testing.assert_close(ours.grad, gradient * spread * free)
    wanted = step.clone().requires_grad_()
    (_spread(wanted, latent.shape, format) * (gradient * (nearest - latent * free))).sum().backward()
    torch.testing.assert_close(our_step.grad, wanted.grad, rtol=1e-4, atol=1e-4)
