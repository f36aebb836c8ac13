"""Triton kernels are compiled ahead of time to PTX, for a GPU that need not be present.

    compiled = compile_kernel(fp8_dense_attention, {"q": "*fp8e4nv", …, "heads": "i32"}, {"dim": 128, …}, arch=90, …)
    compiled.ptx, compiled.name, compiled.threads, compiled.shared

The result can be launched without Triton: pass the arguments of `compiled.arguments` in that order, with
`compiled.threads` threads and `compiled.shared` bytes of dynamic shared memory. Triton ends each parameter list with
two pointers of its own, to scratch memory for profiling and for tensor maps. A kernel that uses neither never reads
them, so they are cut from the list, after a check that nothing refers to them.

Pointers are declared 16-byte aligned, without which every load would be one element wide; integers carry no such
promise, unless the caller says that one is a multiple of 16. The PTX names an architecture-specific target (`sm_90a`),
because FP8 tensor cores exist only there: it runs on GPUs of that compute capability and no others.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

ARCHITECTURES = {89: "sm_89", 90: "sm_90a", 100: "sm_100a", 120: "sm_120a"}
"""PTX targets by compute capability: Ada, Hopper, and Blackwell in data centres and in workstations."""

# 8.7, of CUDA 12.8, is the first version that has sm_120a. A driver compiles PTX of its own version and of older ones,
# and Triton would write the newest that its assembler reads: 9.3 in Triton 3.8, which takes a driver of CUDA 13.3.
_PTX_VERSION = 87

_ENTRY = re.compile(r"\.visible \.entry (\w+)\(\n(.*?)\n\)", re.DOTALL)


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel that any CUDA program can launch."""

    name: str  # the name of the entry point in `ptx`
    ptx: str  # text
    arch: int  # compute capability as a number, such as 90
    arguments: tuple[tuple[str, str], ...]  # (name, Triton type) of each parameter, in order
    num_warps: int  # warps of a block
    shared: int  # bytes of dynamic shared memory

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.num_warps


def compile_kernel(
    kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], *, arch: int, num_warps: int,
    num_stages: int, multiples: Collection[str] = (),
) -> CompiledKernel:  # fmt: skip
    """Compiles a Triton kernel to PTX; the same request is compiled once in a process, and once on this disk.

    Args:
        signature: Triton type by name of every run-time parameter: "*fp8e4nv", "*bf16", "*fp32", "i32".
        constants: value by name of every compile-time parameter; None for a pointer that is not passed.
        arch: a key of `ARCHITECTURES`.
        multiples: integer parameters that are multiples of 16, such as strides that loads are wide along.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"{kernel.__name__}: cannot compile for {arch}; known: {', '.join(map(str, ARCHITECTURES))}")
    names = [*signature, *constants]
    if sorted(names) != sorted(kernel.arg_names):
        raise ValueError(f"{kernel.__name__}: parameters {kernel.arg_names}, but given are {names}")
    options = (arch, num_warps, num_stages, tuple(multiples))
    return _compile(kernel, tuple(signature.items()), tuple(constants.items()), options)


@lru_cache(maxsize=64)
def _compile(
    kernel: Any,
    signature: tuple[tuple[str, str], ...],
    constants: tuple[tuple[str, Any], ...],
    build: tuple[int, int, int, tuple[str, ...]],
) -> CompiledKernel:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arch, num_warps, num_stages, multiples = build
    names = kernel.arg_names
    types = {name: dict(signature).get(name, "constexpr") for name in names}
    # Triton's JIT finds this property in each argument; ahead of time it is declared.
    aligned: dict[Any, Any] = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if types[name].startswith("*") or name in multiples
    }
    values: dict[Any, Any] = {(names.index(name),): value for name, value in constants}
    source = ASTSource(kernel, types, constexprs=values, attrs=aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages, "ptx_version": _PTX_VERSION}
    options["enable_fp_fusion"] = True
    result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    arguments = tuple((name, types[name]) for name in names if types[name] != "constexpr")
    name, ptx = without_scratch(result.asm["ptx"], len(arguments))
    return CompiledKernel(name, ptx, arch, arguments, num_warps, result.metadata.shared)


def without_scratch(ptx: str, keep: int) -> tuple[str, str]:
    """Returns the entry's name, and the PTX with only the first `keep` of its parameters; others must be unused."""
    # A parameter list is the text between the parentheses of `.visible .entry name(`.
    entries = _ENTRY.findall(ptx)
    if len(entries) != 1:
        raise ValueError(f"PTX has {len(entries)} entries, expected one")
    name, listed = entries[0]
    parameters = [line.strip().rstrip(",") for line in listed.splitlines()]
    if len(parameters) < keep:
        raise ValueError(f"{name}: {len(parameters)} parameters in PTX, expected at least {keep}")
    for parameter in parameters[keep:]:
        # `.param .u64 .ptr .global .align 1 name_param_7`: the symbol is the last word, and the body loads it by name.
        symbol = parameter.split()[-1]
        if len(re.findall(rf"{re.escape(symbol)}\b", ptx)) > 1:
            raise ValueError(f"{name}: uses its scratch memory ({symbol}); it cannot be launched without Triton")
    kept_parameters = ",\n".join(f"\t{parameter}" for parameter in parameters[:keep])
    return name, _ENTRY.sub(lambda match: f".visible .entry {match[1]}(\n{kept_parameters}\n)", ptx)
