"""The C++ launches of the plugins: what a served engine runs, on tensors of PyTorch."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from samples import ROOT

from quant.export.tensorrt.cache_plugin import CacheSpec, compile_cache_attention
from quant.export.tensorrt.plugin import Attributes, BundledKernel, compile_attention, pack
from quant.formats.format import FORMATS
from quant.kernels.attention.attention_operands import tiles_for
from quant.kernels.attention.kv_pages import KVPages, write_reference
from quant.kernels.attention.reference import fp8_attention_reference
from quant.kernels.base.ptx import CompiledKernel

sys.path.insert(0, str(ROOT / "benchmarks"))
from _plugin_library import SOURCES, PluginKernels, build_launches, cuda_include

ANY = CompiledKernel("entry", ".version 8.7\n// a line\n", 90, (("q", "*bf16"), ("heads", "i32")), 4, 128)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build_launches(tmp_path_factory.mktemp("library") / "launches.so")
    except ValueError as error:
        if "needs g++" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize(
    ("bundle", "message"),
    [
        (b"ptx", "not a bundle of kernels"),
        (pack([BundledKernel("split", 8, ANY)] * 2)[:-3], "cut off after 1 of them"),
        (pack([BundledKernel("split", 8, ANY)]).replace(b"*bf16,", b","), "without a type: q"),
    ],
)
def test_the_library_refuses_other_text(library: Path, bundle: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PluginKernels(library, bundle)


def test_the_plugins_compile_against_tensorrts_declarations() -> None:
    """The classes of TensorRT that they derive from are declared in `tests/data`; its own headers may be elsewhere."""
    compiler, include = shutil.which("g++"), cuda_include()
    if compiler is None or include is None or not (include / "cuda_runtime_api.h").is_file():
        pytest.skip("needs g++ and CUDA's headers")
    headers = os.environ.get("TENSORRT_INCLUDE", str(Path(__file__).parents[2] / "data" / "tensorrt_headers"))
    options = [
        "-std=c++17",
        "-fsyntax-only",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-isystem",
        headers,
        "-isystem",
        str(include),
    ]
    command = [compiler, *options, str(SOURCES / "plugins.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_every_parameter_of_the_kernels_has_a_value(name: str) -> None:
    """The library passes arguments by name; a kernel that gets another parameter is compiled for it here."""
    pytest.importorskip("triton", reason="compiles the plugin's kernels")
    launches = (SOURCES / "launch.cpp").read_text()
    for kernel in compile_cache_attention(CacheSpec(64, 2, 256, name, "FP16"), 120):
        for parameter, kind in kernel.compiled.arguments:
            assert f'{"address" if kind[0] == "*" else "integer"}("{parameter}"' in launches, (kernel.role, parameter)
        # Keys and values are copied 16 bytes at a time, which needs strides that are known to be multiples of 16.
        if kernel.role == "split":
            assert re.search(r"cp\.async[.\w]* [^;]*, 0x10", kernel.compiled.ptx), kernel.rows


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_dense_attention(library: Path, dim: int) -> None:
    torch.manual_seed(0)
    arch = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    compiled = compile_attention(dim, Attributes(causal=1), arch)
    kernels = PluginKernels(library, pack([BundledKernel("attend", tiles_for(dim, arch).block_q, compiled)]))
    q, k, v = (torch.randn(2, heads, 300, dim, device="cuda").to(torch.float8_e4m3fn) for heads in (8, 2, 2))
    scales = torch.tensor([0.5, 0.7, 0.9], device="cuda")
    out = torch.full((2, 8, 300, dim), math.nan, dtype=torch.bfloat16, device="cuda")
    kernels.attend_dense(q, k, v, scales, out)
    expected = fp8_attention_reference(
        *(x.cpu() for x in (q, k, v, scales)), causal=True, softmax_scale=dim**-0.5, dtype=torch.float32
    )
    assert float((out.cpu().float() - expected).norm() / expected.norm()) < 2.0**-5
    kernels.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
@pytest.mark.parametrize(("heads", "fresh"), [(8, 1), (2, 8), (8, 8), (8, 70)])
def test_cache_attention(library: Path, name: str, heads: int, fresh: int) -> None:
    """Codes bit for bit as the oracle writes them, and attention near float64 over them."""
    torch.manual_seed(0)
    batch, kv_heads, dim, capacity = 3, 2, 128, 1024
    arch = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    spec = CacheSpec(dim, heads // kv_heads, capacity, name, "BF16")
    kernels = PluginKernels(library, pack(compile_cache_attention(spec, arch)))
    past = torch.tensor([0, 333, capacity - fresh], dtype=torch.int32)
    width = dim if name == "fp8" else dim // 2

    def empty(*size: int) -> torch.Tensor:
        # FP8's zero; the tail of a cache is never read, so that it may hold NaN codes.
        return torch.full((batch, kv_heads, capacity, *size), 0x7F, dtype=torch.uint8)

    codes = [empty(width) for _ in "kv"]
    blocks = [empty(dim // 16).view(torch.float8_e4m3fn) if name == "nvfp4" else None for _ in "kv"]
    scales = [(torch.rand(kv_heads) + 0.5) / (100 if name == "fp8" else 600) for _ in "kv"]
    views = [x.view(torch.float8_e4m3fn) if name == "fp8" else x for x in codes]
    pages = KVPages(*views, FORMATS[name], dim, *scales, *blocks)
    table = torch.arange(batch, dtype=torch.int32)[:, None]
    for row, length in enumerate(past.tolist()):
        if length:
            old = torch.randn(2, 1, kv_heads, length, dim).to(torch.bfloat16)
            write_reference(pages, table[row : row + 1], torch.zeros(1, dtype=torch.int32), old[0], old[1])
    new = torch.randn(2, batch, kv_heads, fresh, dim).to(torch.bfloat16)
    q = torch.randn(batch, heads, fresh, dim).to(torch.bfloat16)

    def moved(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.clone().cuda()

    out = torch.full(q.shape, math.nan, dtype=torch.bfloat16, device="cuda")
    tensors = {"q": moved(q), "k": moved(new[0]), "v": moved(new[1]), "k_cache": moved(pages.k)}
    tensors |= {"v_cache": moved(pages.v), "k_blocks": moved(blocks[0]), "v_blocks": moved(blocks[1])}
    tensors |= {"k_scale": moved(scales[0]), "v_scale": moved(scales[1]), "past": moved(past)}
    tensors |= {"lengths": moved(past + fresh), "out": out}
    kernels.attend_cache(kernels.cache_call(tensors, capacity))
    torch.cuda.synchronize()
    write_reference(pages, table, past, new[0], new[1])
    for key, expected in (("k_cache", pages.k), ("v_cache", pages.v), ("k_blocks", blocks[0]), ("v_blocks", blocks[1])):
        if expected is not None:
            assert torch.equal(tensors[key].cpu().view(torch.uint8), expected.view(torch.uint8)), key  # type: ignore[union-attr]
    for row in range(batch):
        length = int(past[row]) + fresh
        k, v = (x.double().repeat_interleave(heads // kv_heads, 0) for x in pages.read([row], length))
        scores = q[row].double() @ k.mT * dim**-0.5
        seen = torch.ones(fresh, length, dtype=torch.bool).tril(length - fresh)
        exact = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
        assert float((out[row].cpu().double() - exact).norm() / exact.norm()) < 2.0**-7
    kernels.close()
