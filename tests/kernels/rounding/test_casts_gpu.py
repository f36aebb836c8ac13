"""Quantizers on a GPU equal the oracle on the CPU, in memory that held other values before."""

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch")

from quant.formats.format import FORMATS, INPUT_FORMATS, Format
from quant.formats.tensor import fake_quantize, quantize
from quant.kernels.rounding import portable_casts

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated for a result is full of 0xA5, so that an element that is not written shows."""
    empty = torch.empty

    def filled(*args: object, **options: object) -> torch.Tensor:
        tensor = empty(*args, **options)
        if tensor.is_cuda and tensor.numel():
            tensor.view(torch.uint8).fill_(0xA5)
        return tensor

    monkeypatch.setattr(torch, "empty", filled)


def static(format: Format, device: str) -> dict[str, torch.Tensor]:
    number = torch.tensor(0.02, device=device)
    if format.block == (0, 0):
        return {"scale": number}
    return {"global_scale": number} if format.global_scale else {}


def rows(tokens: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    x = (torch.randn(tokens, columns) * torch.randn(tokens, columns).exp()).to(dtype)
    x[0, :16] = 0
    if tokens > 2 and dtype is torch.bfloat16:
        x[1] *= 1e-30
        x[2] *= 1e30
    return x


def as_good(found: torch.Tensor, expected: torch.Tensor, x: torch.Tensor) -> None:
    """Of two scales whose errors differ by the order of a sum alone, either may be chosen, which is rare."""
    blocks = [t.double().unflatten(-1, (-1, 16)) for t in (found, expected, x)]
    other = (blocks[0] != blocks[1]).any(-1)
    errors = [(blocks[side][other] - blocks[2][other]).square().sum(-1) for side in (0, 1)]
    assert float(other.double().mean()) < 1e-3
    torch.testing.assert_close(errors[0], errors[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("format", portable_casts.FORMATS_OUT)
def test_codes_and_scales_bit_for_bit(format: str) -> None:
    form = INPUT_FORMATS[format]
    for dtype, tokens, columns in (
        (torch.bfloat16, 300, 4096),
        (torch.bfloat16, 5, 14336),
        (torch.bfloat16, 7, 144),
        (torch.float16, 37, 4096),
        (torch.float16, 1, 256),
    ):
        if columns % max(form.block[1], 1):
            continue
        x = rows(tokens, columns, dtype)
        found = portable_casts.quantize(x.cuda(), form, **static(form, "cuda"))
        if form.input_rule != "max":
            as_good(found.dequantize().cpu(), fake_quantize(x.float(), form, **static(form, "cpu")), x)
            continue
        assert torch.equal(found.dequantize().cpu(), fake_quantize(x.float(), form, **static(form, "cpu")))
        if form.block != (0, 0):
            expected = quantize(x.float(), form, rule=form.input_rule, **static(form, "cpu"))
            assert torch.equal(found.scale.view(torch.uint8).cpu(), expected.scale.view(torch.uint8))


def test_nvfp4_by_scales_of_every_kind() -> None:
    """Whole numbers, of which many quotients are ties or beside one; scales of few bits, of many, and far away."""
    form = FORMATS["nvfp4"]
    whole = torch.randint(-60, 61, (40, 2048)).bfloat16()
    for dtype, x in ((torch.bfloat16, whole), (torch.bfloat16, rows(40, 2048, torch.bfloat16)), (torch.float16, whole)):
        for number in (1.0, 0.75, 1 / 3, 251 / 2688, 7 / 2688, 0.0123456, 1.0 - 2**-24, 1e-20, 1e20):
            known = torch.tensor(number)
            given = x.to(dtype)
            found = portable_casts.quantize(given.cuda(), form, global_scale=known.cuda())
            expected = quantize(given.float(), form, global_scale=known)
            assert torch.equal(found.codes.cpu(), expected.codes), (dtype, number)
            assert torch.equal(found.scale.view(torch.uint8).cpu(), expected.scale.view(torch.uint8)), (dtype, number)


def test_what_is_no_number_stays_in_its_block() -> None:
    """NaN has the code of 6 under a scale that is NaN, and blocks beside it are what they were."""
    form, known = FORMATS["nvfp4"], static(FORMATS["nvfp4"], "cuda")
    x = torch.randn(300, 4096, device="cuda").bfloat16()
    before = portable_casts.quantize(x, form, **known)
    x[7, 130] = torch.nan
    after = portable_casts.quantize(x, form, **known)
    hit = torch.zeros(300, 4096, dtype=torch.bool, device="cuda")
    hit[7, 128:144] = True
    assert bool(((after.codes[hit[:, ::2]] & 0x77) == 0x77).all())
    assert bool(after.scale[hit[:, ::16]].float().isnan().all())
    assert torch.equal(after.codes[~hit[:, ::2]], before.codes[~hit[:, ::2]])
    assert torch.equal(after.scale[~hit[:, ::16]].view(torch.uint8), before.scale[~hit[:, ::16]].view(torch.uint8))


def test_rows_at_odd_places_and_slices() -> None:
    form, known = FORMATS["nvfp4"], static(FORMATS["nvfp4"], "cuda")
    wide = torch.randn(40, 1101, device="cuda").bfloat16()
    for x in (wide[:, 3:515], wide[:, 4:516], wide[::2, 8:520], wide[:1, :512].expand(9, 512)):
        found = portable_casts.quantize(x, form, **known)
        assert torch.equal(found.dequantize().cpu(), fake_quantize(x.cpu().float(), form, **static(form, "cpu")))
