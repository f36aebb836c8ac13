"""`export_aoti` compiles a quantized module ahead of time into a `.pt2` package of AOTInductor.

    torch.export         the module as a graph; a quantized linear is one `quant::` op in it
    this file            what becomes of every such op (the table below)
    AOTInductor          kernels for one device, compiled and tuned, with the weights, in a zip file

    op                                on a GPU                                        on a CPU
    linear, FP8 weights and inputs    with FP8 tensor cores: rounding that fuses      one C++ function for all linears
                                      into the producer of the input, then            of the package (`cpp_linear`)
                                      `torch._scaled_mm`; without: as the next row
    other linears                     launches of our Triton kernels, which lie in    the same function
                                      the package (`triton_linear`)
    convolutions                      weights decoded by a launch, then a plain       weights decoded by integer
                                      convolution                                     arithmetic, then the same
    quant::fp8_attention              our Triton kernel, inside the package           the reference, as a graph

So the package needs neither Python nor this library: C++ loads it with `torch::inductor::AOTIModelPackageLoader` (a
program is in `export/aoti/cpp`), Python with `load_aoti`. Equal input scales, as of q, k and v, become one tensor, so
that their input is rounded once. A package runs on the kind of GPU that compiled it, for kernels are tuned there.

`export_aoti_decoder` compiles a decoder's serving graph into one package, which reads prompts and decodes.

    input_ids      [batch, sequence]    the graph is that of `onnx.serving`: prefill, whole or in chunks, and
    lengths, last  [batch]              decoding are steps of different lengths
    past_key.0, past_value.0, past_key.1, …    the KV cache, [batch, kv_heads, capacity, dim]
    -> logits      [batch, vocabulary]  of each row's last token

The package writes new keys and values into the cache's tensors themselves, from position `lengths` on, so a caller
passes the same tensors at every step. C++ passes all inputs as a list, in this order.

The metadata of a package describes it as JSON, so that a runner can refuse one before it loads any of its code.
"""

import contextlib
import functools
import gc
import platform
import re
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from quant.base.atomic import put_file, temporary_directory
from quant.base.errors import UserError, option
from quant.base.json_files import json_text, parse_json
from quant.base.processor import memory_left
from quant.calibration.attention_scales import AttentionScales
from quant.calibration.session import free_memory
from quant.export.aoti.op_bodies import BODIES, EXPORTED_ATTENTION, INNER_BODIES, analysed_once, launches
from quant.export.onnx import serving
from quant.export.onnx.attention_nodes import scatter
from quant.export.onnx.decoder_graph import attending
from quant.export.onnx.engine_session import check_memory, check_step
from quant.export.onnx.trace import Dims, replaced_ops, trace_for_torch
from quant.formats.format import FORMATS, Number
from quant.generate.fused_decoder import merge_rows
from quant.kernels.linear.conv import QuantConv
from quant.kernels.linear.quant_linear import LINEAR, QuantLinear
from quant.kernels.linear.quantized_module import restore_layout
from quant.recipes.blocks import replaced

# `quant::linear` in packages for CPUs is one C++ function, `cpp/linear.h`, that Inductor calls as it is. Replaced by
# PyTorch ops, a linear is some dozens of nodes, and tracing, fusing and compiling them anew for every layer takes
# minutes for a model of 30 layers. As one op it is one node, and the function is compiled once a package. It rounds
# inputs and decodes weights as the oracle does, by tables of the numbers and formats, and multiplies by PyTorch's own
# matrix product, so that a package has the results of eager PyTorch.
SOURCE = Path(__file__).with_name("cpp") / "linear.h"
# Packages of different versions may be loaded together, so the name is none that another library can see.
_DECLARATION = (
    '__attribute__((visibility("hidden"))) '
    "AOTITorchError aoti_torch_cpu_linear(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*, "
    "AtenTensorHandle*, AtenTensorHandle*, char const*, char const*, AtenTensorHandle*)"
)


def linear_settings() -> dict[str, Any]:
    """Returns the settings by which Inductor calls the function for `quant::linear`, and has its source."""
    # Inductor writes `extern "C" { extern DECLARATION; }` before its own code. The text closes this block after the
    # declaration and opens another, so that the definition stands between the two.
    shim = f'{_DECLARATION};\n}}\n{linear_source()}\nextern "C" {{\nextern {_DECLARATION}'
    namespace, name = LINEAR.split("::")
    return {"aot_inductor.custom_ops_to_c_shims": {getattr(getattr(torch.ops, namespace), name).default: [shim]}}


def has_cpp_linears(program: torch.export.ExportedProgram) -> bool:
    """Returns whether the function computes all linears of a graph; it has no input format with a rule of its own."""
    activations = {node.args[-1] for node in program.graph.nodes if str(node.target).startswith("quant.linear")}
    return all(not name or name in FORMATS for name in activations)


def linear_source() -> str:
    """Returns the C++ source, with the tables of all numbers and formats in it."""
    numbers = {number.name: number for format in FORMATS.values() for number in (format.element, format.scale)}
    lines = [_number(number) for number in numbers.values()]
    rows = []
    for format in FORMATS.values():
        block, has_second = f"{format.block[0]}, {format.block[1]}", str(format.global_scale).lower()
        parts = f"&k{format.element.name.upper()}, &k{format.scale.name.upper()}"
        rows.append(f'    {{"{format.name}", {parts}, {block}, {has_second}}}')
    lines.append("constexpr Format kFormats[] = {\n" + ",\n".join(rows) + "};")
    return SOURCE.read_text(encoding="utf-8").replace("// @tables@", "\n".join(lines))


def _number(number: Number) -> str:
    values, lines = "nullptr", []
    if not number.is_wide:
        values = f"k{number.name.upper()}Values"
        listed = ", ".join(map(_literal, number.values().tolist()))
        lines.append(f"constexpr float {values}[] = {{{listed}}};")
    limits = (2.0**-number.mantissa, number.min_normal, 2.0**number.max_exponent, number.min, number.max)
    fields = [str(number.bits), str(number.is_integer).lower(), *map(_literal, limits), values]
    lines.append(f"constexpr Number k{number.name.upper()} = {{{', '.join(fields)}}};")
    return "\n".join(lines)


def _literal(value: float) -> str:
    """Returns a float32 as C++ writes it: hexadecimal, and so exact."""
    if value != value:
        return "NAN"
    return ("-" if value < 0 else "") + "INFINITY" if abs(value) == float("inf") else f"{value.hex()}f"


# The line of a traceback that names an exception, such as `triton.compiler.errors.CompilationError: at 3:4:`.
_EXCEPTION = re.compile(r"(?:[a-z_]\w*\.)*[A-Z]\w*: ")
_LONGEST = 800  # characters of a message that come from a compiler
METADATA = "blockscale"
"""Key in the metadata of a decoder's package; its value is JSON: capacity, caches, dtype, digest of the plan, torch."""


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Makes Python look for garbage once in 50,000 new objects while open, instead of once in 700 to 2,000.

    A tracer makes millions of objects, nearly all of which stay: the search takes a tenth of its time.
    """
    thresholds = gc.get_threshold()
    if 0 < thresholds[0] < 50_000:  # 0 is never
        gc.set_threshold(50_000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@collecting_rarely()
def export_aoti(
    model: nn.Module, path: str | Path, inputs: Mapping[str, Tensor], *, dims: Dims | None = None,
    ranges: Mapping[str, tuple[int, int]] | None = None, attention_scales: Mapping[str, AttentionScales] | None = None,
    device: torch.device | str | None = None, options: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Compiles `model` into a `.pt2` package and returns its path.

    Args:
        model: quantized or not. A transformers model gives its logits, or else its last hidden state; the outputs
            of any other are tensors, in any nest of tuples and dicts. It is moved to `device`.
        path: the path of the package, which ends in `.pt2`.
        inputs: an example of each input by the name of `forward`'s parameter.
        dims: names of dynamic dimensions, by input and axis; all others are fixed at the examples' sizes.
        ranges: smallest and largest size of a named dimension.
        attention_scales: from `collect_attention_scales`; attention of a transformers model is then in FP8.
        device: "cuda" or "cpu"; by default the GPU if there is one.
        options: settings of Inductor, such as `{"max_autotune": True}`.

    Raises:
        ValueError: there is no such device, the name is wrong, the model does not export, or the C++ compiler cannot
            make a library that torch loads; nothing is written.
    """
    path = Path(path)
    device = find_device(path, device)
    check_compiler(path, options or {})
    examples = {name: x.to(device).contiguous() for name, x in inputs.items()}
    with scales_as_matrices(model.to(device)):
        program = trace_for_torch(model, examples, dims=dims, ranges=ranges, attention_scales=attention_scales)
    share_input_scales(program)
    return compile_package(program, BODIES, path, device, options or {})


def find_device(path: Path, device: torch.device | str | None) -> torch.device:
    """Returns the device that a package is compiled for; ValueError if it is missing, or if `path` has a wrong name."""
    if path.suffix != ".pt2":
        raise ValueError(f"{path}: an AOTInductor package ends in .pt2")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{path}: no CUDA device here; a package for a GPU is made on that GPU, or pass device='cpu'")
    return device


def compile_package(
    program: torch.export.ExportedProgram, bodies: Mapping[str, Callable[..., Tensor]], path: Path,
    device: torch.device, options: Mapping[str, Any], metadata: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """Compiles a graph into the package `path`; arguments and errors are as for `export_aoti`.

    Inductor compiles the ops of `bodies` in place of the ops of these names, but for `quant::linear` on a CPU, which is
    a function of its own. `metadata` is stored in the package as JSON, next to Inductor's own entries on the device.
    """
    on_gpu = device.type == "cuda"
    # Compiled headers and, for a GPU, a trial of CPU vector instructions take longer than they save.
    settings = {
        "aot_inductor.precompile_headers": False,
        **({"cpp.vec_isa_ok": False} if on_gpu else linear_settings()),
        **options,
        "aot_inductor.metadata": dict(metadata or {}),
    }
    replaced = {**bodies, **INNER_BODIES}
    if on_gpu:
        replaced |= launches()
    elif has_cpp_linears(program):
        del replaced[LINEAR]
    # The ops are replaced while Inductor traces the graph: a trace of ours before it takes seconds, and with launches
    # in it a minute for 30 layers.
    with (
        temporary_directory(path) as folder,
        replaced_ops(replaced),
        analysed_once(),
        buffers_kept(),
        warnings.catch_warnings(),
    ):
        # torch 2.13 copies its own tree of inputs by a class that it has deprecated, and uses torch.jit.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        try:
            package = torch._inductor.aoti_compile_and_package(
                program, package_path=str(Path(folder, path.name)), inductor_configs=settings
            )
        except Exception as error:  # compilers raise exceptions of many types
            hint = "; install g++, or set CXX to a C++ compiler" if "InvalidCxxCompiler" in str(error) else ""
            raise ValueError(f"{path}: AOTInductor did not compile it: {cause_of(error)}{hint}") from error
        put_file(Path(package), path)
    return path


@contextlib.contextmanager
def buffers_kept() -> Iterator[None]:
    """Keeps alive what Inductor writes C++ into while open, so that each array is declared before it is used.

    It declares an array of sizes once for each buffer that it writes lines into, and remembers the buffer by its
    address: torch 2.11 by that of a bound method, which the next one gets too, later versions by the buffer's own. A
    large graph then names an array that is declared further down, and does not compile.
    """
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    declare, methods = CppWrapperCpu.codegen_int_array_var, dict[Any, Any]()

    def by_buffer(self: Any, int_array: str, writeline: Any, *arguments: Any, **options: Any) -> Any:
        # One bound method for each buffer, which it keeps alive.
        key = id(getattr(writeline, "__self__", writeline)), getattr(writeline, "__func__", None)
        return declare(self, int_array, methods.setdefault(key, writeline), *arguments, **options)

    CppWrapperCpu.codegen_int_array_var = by_buffer  # type: ignore[method-assign]
    try:
        yield
    finally:
        CppWrapperCpu.codegen_int_array_var = declare  # type: ignore[method-assign]


def cause_of(error: BaseException) -> str:
    """Returns the exception that made Inductor stop, or the first error of its C++ compiler, on one line.

    Inductor compiles kernels in processes of its own, and wraps their tracebacks into the text of further exceptions:
    the innermost one stands at the end.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = max((index for index, line in enumerate(lines) if _EXCEPTION.match(line)), default=0)
    # A C++ compiler's first error is the cause of the others.
    last = next((index for index, line in enumerate(lines) if ": error: " in line), last)
    text = " ".join(" ".join(lines[last:]).split()) or type(error).__name__
    # Long texts, such as a compiler's output, say the most at their beginning and at their end.
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


def load_aoti(path: str | Path, *, single_threaded: bool = False) -> Callable[..., Any]:
    """Returns a package as a function of the model's inputs; a decoder's raises ValueError for a cache with gaps.

    A function for a single thread has no events that keep threads apart, which a CUDA graph cannot hold. Compiled code
    takes every tensor for contiguous and does not look at its strides, so an input such as `ids[:, :50]` is copied
    first. A decoder's package writes into its cache, and would write into the copy.
    """
    package = torch._inductor.aoti_load_package(str(path), run_single_threaded=single_threaded)
    writes = METADATA in package.get_metadata()

    def contiguous(x: Tensor) -> Tensor:
        if writes and not x.is_contiguous():
            raise ValueError(f"{path}: an input {list(x.shape)} of strides {list(x.stride())} is not contiguous")
        return x.contiguous()

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, contiguous, (args, kwargs))
        return package(*args, **kwargs)

    return run


def check_compiler(path: Path, options: Mapping[str, Any]) -> None:
    """Raises ValueError if the C++ compiler puts a C++ library of its own into the package that is to become `path`.

    Two copies of libstdc++ in one process disagree on locales, and the package crashes while it is loaded.
    """
    from torch._inductor import config, cpp_builder

    content = b""
    with config.patch(dict(options)), tempfile.TemporaryDirectory() as folder, contextlib.suppress(Exception):
        # Inductor names a compiler that is not there or compiles nothing.
        command = [cpp_builder.get_cpp_compiler(), "-x", "c++", "-shared", "-fPIC", "-", "-o", f"{folder}/test.so"]
        subprocess.run(command, input=b"#include <iostream>\nauto& out = std::cout;\n", check=True, capture_output=True)
        content = Path(folder, "test.so").read_bytes()
    # ELF lists needed libraries by name; one of the C++ library means that it is linked dynamically.
    if content[:4] == b"\x7fELF" and not any(library in content for library in (b"libstdc++.so", b"libc++.so")):
        raise ValueError(
            f"{path}: the C++ compiler links libstdc++ statically, and such a package crashes where torch loads it; "
            "set CXX to a compiler that has libstdc++.so, such as the system's g++"
        )


@contextlib.contextmanager
def scales_as_matrices(model: nn.Module) -> Iterator[None]:
    """Reshapes static input scales and second-level scales to `[1, 1]` while open.

    Inductor turns scalars into code, but `_scaled_mm` and our kernels read scales from memory.
    """
    restore_layout(model)  # MXFP4 in the layout of a GPU's kernel has a second-level scale, which is no matrix
    modules = [module for module in model.modules() if isinstance(module, QuantLinear | QuantConv)]
    with replaced(
        (module, name, scale.reshape(1, 1))
        for module in modules
        for name in ("input_scale", "global_scale")
        if (scale := getattr(module, name)) is not None
    ):
        yield


def share_input_scales(program: torch.export.ExportedProgram) -> None:
    """Makes layers with equal static input scales read the first one's, so that a common input is rounded once."""
    # Buffers are placeholders of the exported graph; their values are in its state dict.
    names = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.target is not None}
    first: dict[float, Any] = {}
    for node in program.graph.nodes:
        target = names.get(node.name, "") if node.op == "placeholder" else ""
        if target.rpartition(".")[2] == "input_scale":
            shared = first.setdefault(float(program.state_dict[target]), node)
            if shared is not node:
                node.replace_all_uses_with(shared)
    program.graph_module.recompile()


_SCATTER = "quant::onnx_scatter"
_SIBLINGS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


class _Part(nn.Module):
    """One of the siblings that share a product; the first one has the matrix."""

    def __init__(self, whole: nn.Module | None, product: Callable[..., Any], index: int) -> None:
        super().__init__()
        self.whole, self.product, self.index = whole, product, index

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)[self.index]


@contextlib.contextmanager
def siblings_merged(model: nn.Module) -> Iterator[None]:
    """Puts one product in the place of linears with one input (q, k and v; gate and up) while open.

    With few tokens a launch takes microseconds, whatever the number of rows. Siblings whose formats or scales differ
    stay apart.
    """
    parts: list[tuple[nn.Module, str, _Part]] = []
    dtype = next(model.parameters()).dtype
    for parent in model.modules():
        for names in _SIBLINGS:
            members = [getattr(parent, name, None) for name in names]
            whole = None if None in members else merge_rows(members, dtype)  # type: ignore[arg-type]
            if whole is None:
                continue
            rows = [member.out_features for member in members]  # type: ignore[union-attr]
            # The first sibling to read an input computes it for all.
            product = functools.lru_cache(1)(lambda x, whole=whole, rows=rows: whole(x).split(rows, -1))
            parts += [(parent, name, _Part(None if i else whole, product, i)) for i, name in enumerate(names)]
    with replaced(parts):
        yield


class InPlaceGraph(serving.ServingGraph):
    """A serving graph that writes into the cache that it is called with, and returns logits alone."""

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> Any:
        """Returns logits `[batch, vocabulary]`."""
        logits, *written = super().forward(inputs, past)
        # Inductor sees that each cache was made from the input of its name, and writes the new rows alone.
        for cache, new in zip(past, written, strict=True):
            cache.copy_(new)
        return logits


@collecting_rarely()
def export_aoti_decoder(
    model: nn.Module, path: str | Path, capacity: int, *, shapes: str | list[str] | None = None, plan: str = ""
) -> Path:
    """Compiles a causal language model, quantized or not, into a `.pt2` package with a KV cache; returns its path."""
    path = Path(path)
    device = find_device(path, next(model.parameters()).device)
    check_compiler(path, {})
    program, caches = decoder_program(model, capacity, shapes=shapes)
    description = {
        "capacity": capacity,
        "caches": [[heads, dim] for heads, dim, _ in caches],
        "dtype": str(caches[0][2]).removeprefix("torch."),
        "plan": plan,
        "torch": torch.__version__.partition("+")[0],
    }
    return compile_package(program, DECODER_BODIES, path, device, {}, {METADATA: json_text(description)})


def decoder_program(
    model: nn.Module, capacity: int, *, shapes: str | list[str] | None = None
) -> tuple[torch.export.ExportedProgram, list[tuple[int, int, torch.dtype]]]:
    """Returns the graph that is compiled, and KV heads, dimension and dtype of each part of its cache."""
    serving.check_decoder(model, capacity)
    function = serving.CachedAttention({module: name for name, module in model.named_modules()})
    merged = siblings_merged(model) if next(model.parameters()).is_cuda else contextlib.nullcontext()
    with merged, attending(model, function, masked=False), scales_as_matrices(model):
        caches = serving.cache_shapes(model, function)
        with next(model.parameters()).device:
            past = function.cache_inputs(caches, capacity)
        program, _ = serving.trace_serving(InPlaceGraph(model, function), past, shapes, capacity)
    share_input_scales(program)
    return program, caches


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, *_: Any) -> Tensor:
    """Attends over the whole cache, where a mask `[batch, 1, sequence, capacity]` says who sees which.

    The query heads that share keys become further queries, so that no key of the cache is copied:
    [batch, kv_heads · group, sequence, dim] -> [batch, kv_heads, group · sequence, dim].
    """
    kv_heads, sequence = k.shape[1], q.shape[2]
    group = q.shape[1] // kv_heads
    queries = q.unflatten(1, (kv_heads, group)).flatten(2, 3)
    seen = mask[:, :, None].expand(-1, -1, group, -1, -1).flatten(2, 3)
    grouped = nn.functional.scaled_dot_product_attention(queries, k, v, seen, scale=scale)
    return grouped.unflatten(2, (group, sequence)).flatten(1, 2)


DECODER_BODIES: dict[str, Callable[..., Tensor]] = {**BODIES, EXPORTED_ATTENTION: _attention, _SCATTER: scatter}
"""The bodies of quantized layers, of attention over a cache, and of writing into it, by the names of their ops."""


_FIELDS = {"capacity": int, "caches": list, "dtype": str, "plan": str, "torch": str}
_DTYPES = ("float32", "float16", "bfloat16")
_METADATA_BYTES = 1 << 20  # bytes of metadata
# Vector instructions of a processor, as Inductor names them, and whether this one has them.
_INSTRUCTIONS = {
    "AMX": torch.cpu._is_amx_tile_supported,
    "AVX512": torch.cpu._is_avx512_supported,
    "AVX2": torch.cpu._is_avx2_supported,
}


class AotiSession:
    """See `EngineSession`; any number of rows and any width run, within the limits of `--shapes`.

    On a GPU steps of one token are replayed by a CUDA graph: launched one by one, hundreds of kernels of a few
    microseconds each wait for the host.
    """

    recurrent = False

    def __init__(self, path: Path, *, unsafe_load: bool = False) -> None:
        self._path = path
        entries = read_metadata(path)
        description = entries[METADATA]
        check_machine(path, entries)
        if not unsafe_load:
            raise UserError(
                f"{path} is compiled code, which runs when it is loaded; if you trust it, pass "
                f"{option('unsafe_load', True)}"
            )
        self._device = torch.device(entries["AOTI_DEVICE_KEY"])
        self._torch_dtype = getattr(torch, description["dtype"])
        # [heads, capacity, dim] of keys and values, in order of the layers
        self._shapes = [(heads, description["capacity"], dim) for heads, dim in description["caches"]]
        self._caches: list[Tensor] = []
        # A graph, and the inputs and logits in the host's memory that it reads and writes.
        self._captured: tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Tensor] | None = None
        self.capacity: int = description["capacity"]
        self.dtype: str = description["dtype"]
        self.plan: str = description["plan"]
        name = torch.cuda.get_device_name() if self._device.type == "cuda" else "CPU"
        self.backend = f"AOTInductor of torch {torch.__version__}, {name}"
        try:
            self._run = load_aoti(path, single_threaded=self._device.type == "cuda")
        except RuntimeError as error:
            raise UserError(f"{path}: torch cannot load it: {' '.join(str(error).split())[:300]}") from error

    def most_rows(self) -> int:
        return 1 << 16

    def begin(self, rows: int) -> None:
        self._caches, self._captured = [], None
        values = sum(rows * int(np.prod(shape)) for shape in self._shapes)
        free = free_memory(self._device) if self._device.type == "cuda" else memory_left()
        check_memory(self._path, values * self._torch_dtype.itemsize, free, rows)
        self._caches = [torch.zeros(rows, *s, dtype=self._torch_dtype, device=self._device) for s in self._shapes]

    def width(self, tokens: int) -> int:
        return min(tokens, self.capacity)

    def step(self, ids: np.ndarray, lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
        check_step(ids, lengths, last, self.capacity)
        inputs = {
            name: torch.from_numpy(value)
            for name, value in ((serving.IDS, ids), (serving.LENGTHS, lengths), (serving.LAST, last))
        }
        try:
            if self._device.type == "cuda" and ids.shape[1] == 1:
                logits = self._replayed(inputs)
            else:
                logits = self._run({name: x.to(self._device) for name, x in inputs.items()}, self._caches)
        except RuntimeError as error:
            raise UserError(f"{self._path}: the package stopped: {' '.join(str(error).split())[:300]}") from error
        return logits.float().cpu().numpy()

    def _replayed(self, inputs: dict[str, Tensor]) -> Tensor:
        """Returns the logits of a step of one token a row; the first one of an empty cache's rows is captured."""
        if self._captured is None:
            host = {name: x.pin_memory() for name, x in inputs.items()}

            def run() -> Tensor:
                given = {name: x.to(self._device, non_blocking=True) for name, x in host.items()}
                logits: Tensor = self._run(given, self._caches)
                return logits.float()

            result = torch.empty_like(run(), device="cpu", pin_memory=True)  # the run loads the kernels
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # it writes the keys of the run again
                result.copy_(run(), non_blocking=True)
            self._captured = graph, host, result
        graph, host, result = self._captured
        for name, x in inputs.items():
            host[name].copy_(x)
        graph.replay()
        torch.cuda.current_stream(self._device).synchronize()
        return result.clone()


def read_metadata(path: Path) -> dict[str, Any]:
    """Returns the metadata of a decoder's package, read without loading its code; UserError for any other file."""
    other = (
        f"{path}: no package of a decoder with a KV cache; export one with `quant export DIRECTORY --to aoti`, without "
        f"{option('capacity', 0)}"
    )
    try:
        with zipfile.ZipFile(path) as archive:
            name = next((name for name in archive.namelist() if name.endswith("wrapper_metadata.json")), None)
            if name is None or archive.getinfo(name).file_size > _METADATA_BYTES:
                raise UserError(other)
            entries = parse_json(archive.read(name))
            description = parse_json(entries.get(METADATA, "{}")) if isinstance(entries, dict) else {}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: no package of AOTInductor: {error}") from error
    # The package's own entry of its metadata has all fields, of the right types.
    are_fields = isinstance(description, dict) and all(isinstance(description.get(k), t) for k, t in _FIELDS.items())
    if not are_fields or description["dtype"] not in _DTYPES:
        raise UserError(other)
    for pair in description["caches"]:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(size, int) for size in pair)):
            raise UserError(other)
    return {**entries, METADATA: description}


def check_machine(path: Path, entries: Mapping[str, Any]) -> None:
    """Raises UserError for a package of another version of torch, another kind of processor, or another GPU."""
    version, installed = entries[METADATA]["torch"], torch.__version__.partition("+")[0]
    again = "export it again on a machine like this one"
    if version != installed:
        raise UserError(f"{path} was compiled by torch {version}, and torch {installed} is installed; export it again")
    system = (str(entries.get("AOTI_PLATFORM")), str(entries.get("AOTI_MACHINE")))
    if system != (sys.platform, platform.machine()):
        raise UserError(
            f"{path} was compiled for {' '.join(system)}, and this is {sys.platform} {platform.machine()}; {again}"
        )
    instructions = str(entries.get("AOTI_CPU_ISA"))
    missing = [name for name, supported in _INSTRUCTIONS.items() if name in instructions and not supported()]
    if entries.get("AOTI_DEVICE_KEY") == "cpu":
        if missing:
            raise UserError(f"{path} was compiled for a processor with {missing[0]}, which this one lacks; {again}")
        return
    if not torch.cuda.is_available():
        raise UserError(f"{path} was compiled for a GPU, and this machine has none; export it on a machine without one")
    compiled, local = str(entries.get("AOTI_COMPUTE_CAPABILITY")), "".join(map(str, torch.cuda.get_device_capability()))
    if compiled != local:
        raise UserError(f"{path} was compiled for a GPU of sm{compiled}, and this one is sm{local}; {again}")
