"""Checkpoints that were released quantized are dequantized while they are read, one tensor at a time.

`QuantizedTensors` has the names, shapes and dtype of the original checkpoint. Tensors without scales are returned
unchanged, so layers that the source left in 16 bit stay so. Scales of inputs and of the KV cache are left out.

value = scale · (code − zero), in float32, then rounded once. Floating-point codes and their scales are a
`BlockScaledTensor`, whose format is read off dtypes and shapes. Integer codes lie in words of 32 bits, the first code
in the lowest bits:

    GPTQ                 qweight [in·b/32, out], qzeros [groups, out·b/32], scales [groups, out], and g_idx [in],
                         the group of each input
    AWQ                  qweight [in, out/8], qzeros [groups, out/8], scales [groups, out]; the nibbles of a word are
                         columns 0, 2, 4, 6, 1, 3, 5, 7
    compressed-tensors   weight_packed [out, in·b/32], weight_scale [out, groups], weight_zero_point [out·b/32, groups]

GPTQ's first version stores zeros less one, subtracted from whole words, and its writer (GPTQModel) adds them again in
the same way. Sources: the files `qlinear/torch.py` and `utils/model.py` of GPTQModel, `gemm.py` of AutoAWQ, and
`pack_quantized` of compressed-tensors.

Codes are never cast to numbers: where scales stand in a file and no config says how to apply them, and where FP8
weights have no scales, the file is refused.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quant.base.errors import UserError, listed
from quant.base.json_files import typed
from quant.base.processor import in_memory
from quant.export.checkpoint.files import modelopt
from quant.export.checkpoint.files.layouts import layout_of_tensors
from quant.formats.format import E2M1, E4M3, E5M2, E8M0, FORMATS, FP32, INT4, INT8, Format
from quant.models.files import read_fields, safetensors_file
from quant.recipes.plan import PLAN_FILE

_FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
CODES = (*_FP8, "U8", "I8", "I32")
"""Dtypes of codes, as safetensors call them."""
_SCALES = ("_scale_inv", "_scale", "_scales", "_blocks", "_scale_2", "_global_scale", "_zero_point", "_packed")
_INTEGER_PARTS = ("qweight", "qzeros", "weight_packed", "weight_scale", "weight_scale_2", "SCB")
_LAYOUTS = (
    "float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense",
)  # fmt: skip
# Where a config says which of its method's layouts it is, besides "format".
_LAYOUT_KEYS = {"gptq": "checkpoint_format", "awq": "version"}
_FIELDS: dict[str, Any] = {
    "bits": int | None, "config_groups": dict[str, dict[str, Any]] | None, "group_size": int | None,
    "sparsity_config": dict[str, Any] | None, "weight_block_size": list[int] | None,
}  # fmt: skip
WAY_OUT = "quantize the original model"


class QuantMethod(StrEnum):
    """The `quant_method`s whose codes can be decoded."""

    FP8 = "fp8"
    FBGEMM_FP8 = "fbgemm_fp8"
    MXFP4 = "mxfp4"
    GPTQ = "gptq"
    AWQ = "awq"
    COMPRESSED_TENSORS = "compressed-tensors"
    MODELOPT = "modelopt"


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint is quantized, as its config says."""

    path: Path  # the directory of the model
    method: str  # `quant_method`
    config: Mapping[str, Any]  # the `quantization_config`

    def __str__(self) -> str:
        """Returns the format, for plans and the terminal."""
        config = self.config
        group = config.get("group_size")
        if self.method in (QuantMethod.GPTQ, QuantMethod.AWQ):
            groups = f"groups of {group}" if group and group > 0 else "one group"
            return f"{self.method.upper()} INT{config.get('bits', 4)} in {groups}"
        if self.method in (QuantMethod.FP8, QuantMethod.FBGEMM_FP8):
            block = config.get("weight_block_size")
            return f"FP8 in blocks of {block[0]}x{block[1]}" if block else "FP8"
        if self.method == QuantMethod.COMPRESSED_TENSORS:
            return f"compressed-tensors {config.get('format', '')}".strip()
        return f"ModelOpt {config.get('quant_algo')}" if self.method == QuantMethod.MODELOPT else self.method.upper()

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """The `weights` of compressed-tensors' groups."""
        return [group.get("weights") or {} for group in (self.config.get("config_groups") or {}).values()]

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Blocks of weights that share a scale: those that the config names, then the usual one."""
        named = [weights.get("block_structure") or (1, weights.get("group_size") or 0) for weights in self.groups]
        blocks = [*named, self.config.get("weight_block_size") or (128, 128)]
        return [(int(rows), int(columns)) for rows, columns in blocks]


AFTER_TRAINING = (
    "it holds the weights of a model in training, and no quantized ones: prepare the original model as it was then, "
    "load these weights into it (a Trainer resumes from them; safetensors.torch.load_model reads a file of them), and "
    "pack it with quant.pack"
)
_IN_TRAINING = "blockscale-qat: "
IN_TRAINING = {"quant_method": "fp8", "activation_scheme": _IN_TRAINING + AFTER_TRAINING}
"""The `quantization_config` of a directory that a model in training was saved to.

transformers ignores a `quant_method` that it does not know and loads the weights as a model in 16 bit, although they
may be rotated or scaled. It knows this method, as vLLM does. Both refuse the unknown activation scheme with a message
that shows it, and the scheme's name says what to do.
"""


def is_in_training(fields: Mapping[str, Any]) -> bool:
    """Returns whether a `quantization_config` describes a model in training."""
    return str(fields.get("activation_scheme")).startswith(_IN_TRAINING)


def quantization_of(path: Path, config: Mapping[str, Any]) -> Quantization | None:
    """Returns how the checkpoint in a directory is quantized; UserError for one that cannot be decoded."""
    # Multimodal models may have the table in the config of a part, such as `text_config`.
    sections = (config, *(part for part in config.values() if isinstance(part, dict)))
    keys = ("quantization_config", "compression_config")
    fields = next((section[key] for section in sections for key in keys if isinstance(section.get(key), dict)), None)
    if fields is None and (path / modelopt.CONFIG_FILE).is_file():
        inside = read_fields(path / modelopt.CONFIG_FILE).get("quantization")
        fields = {"quant_method": QuantMethod.MODELOPT.value, **(inside if isinstance(inside, dict) else {})}
    if fields is None:
        return None
    try:
        for key, kind in _FIELDS.items():
            typed(kind, fields.get(key), key)
        for name, group in (fields.get("config_groups") or {}).items():
            weights = typed(dict[str, Any] | None, group.get("weights"), f"{name}.weights") or {}
            for key, kind in (("group_size", int | None), ("block_structure", list[int] | None)):
                typed(kind, weights.get(key), f"{name}.{key}")
            _check_block(weights.get("block_structure"), weights.get("group_size"), name)
        _check_block(fields.get("weight_block_size"), None, "weight_block_size")
    except ValueError as error:
        raise UserError(f"{path}: its quantization_config says {error}; download the model again") from None
    # Exports of ModelOpt may name a `quant_algo` and no `quant_method`.
    method = str(fields.get("quant_method") or QuantMethod.MODELOPT).lower()
    if (path / PLAN_FILE).is_file():
        raise UserError(f"{path}: already quantized by this toolkit, as its {PLAN_FILE} says; {WAY_OUT}")
    quantization = Quantization(path, method, fields)
    if refusal := _why_not(quantization):
        raise UserError(f"{path}: already quantized, {refusal}")
    return quantization


def _check_block(block: list[int] | None, size: int | None, name: str) -> None:
    if (block is not None and (len(block) != 2 or min(block) < 1)) or (size is not None and size < -1):
        raise ValueError(f"{name}: {block or size} is not the size of a block")


def _why_not(quantization: Quantization) -> str | None:
    """Returns why nothing here decodes a checkpoint, and the way out."""
    config, method = quantization.config, quantization.method
    if method == "bitsandbytes" or config.get("load_in_4bit") or config.get("load_in_8bit"):
        return (
            f"by bitsandbytes, whose codes only that package decodes; {WAY_OUT}, or load this one with transformers, "
            "then model.dequantize() and model.save_pretrained(DIR), and pass DIR"
        )
    if is_in_training(config):
        return f"by a recipe that is still in training; {AFTER_TRAINING}"
    if method not in list(QuantMethod):
        return f"by {method}, which cannot be read here; {WAY_OUT}, or one in {', '.join(QuantMethod)}"
    layout = str(config.get(_LAYOUT_KEYS.get(method, "")) or config.get("format") or "").lower()
    if method == QuantMethod.GPTQ and layout not in ("", "gptq", "gptq_v2"):
        return f"by GPTQ in the layout {layout!r}; the layouts gptq and gptq_v2 can be read: {WAY_OUT}"
    if method == QuantMethod.AWQ and (layout not in ("", "gemm") or config.get("bits", 4) != 4):
        return f"by AWQ in {config.get('bits')} bits and the layout {layout!r}; 4 bits in gemm can be read: {WAY_OUT}"
    if method != QuantMethod.COMPRESSED_TENSORS:
        return None
    sparse = (config.get("sparsity_config") or {}).get("format", "dense")
    layout = layout if sparse == "dense" else sparse
    if layout not in ("", *_LAYOUTS):
        return f"in the compressed-tensors layout {layout}, which cannot be read here; {WAY_OUT}"
    if config.get("transform_config"):
        # An original in 16 bit cannot hold the transform of the inputs.
        return f"and its weights are rotated or scaled (transform_config), which their inputs must be, too; {WAY_OUT}"
    return None


def refuse_packed(
    file: Path,
    dtypes: Mapping[str, str],
    names: Iterable[str] | None = None,
    clause: str = ", and no quantization_config says how; give the model's directory with its config.json",
) -> None:
    """Raises UserError for a tensor that is codes or scales, where no config says how to decode it.

    `dtypes` are those of the tensors to look at, as safetensors call them, and `names` those of all in the file.
    """
    names = dtypes if names is None else names
    for name in dtypes:
        # A name proves little by itself: models have parameters called `…_scale` and `…_blocks` that are not quantized.
        # A suffix counts where the tensor that it belongs to is in the file too.
        suffix = next((s for s in _SCALES if name.endswith(s) and name.removesuffix(s) in names), None)
        blocks = name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in names
        if suffix or blocks or name.endswith("_scale_inv") or name.rpartition(".")[2] in _INTEGER_PARTS:
            raise UserError(f"{file}: {name} belongs to a quantized weight{clause}, or {WAY_OUT}")
    for name, dtype in dtypes.items():
        if dtype.startswith("F8_"):
            raise UserError(f"{file}: {name} is in FP8 and has no scale{clause}, or {WAY_OUT}")
        if dtype.startswith(("I", "U", "BOOL")) and name.endswith((".weight", ".bias")):
            raise UserError(f"{file}: {name} holds integers ({dtype}){clause}, or {WAY_OUT}")


Parts = Mapping[str, Tensor]
Block = tuple[int, int]

# Tensors of a quantized layer for its inputs, its outputs and the KV cache; the values of its weight do not need them.
_RUN_TIME = (
    "input_scale", "input_scale_ub", "activation_scale", "input_global_scale", "input_zero_point", "output_scale",
    "q_scale", "k_scale", "v_scale", "kv_scale", "prob_output_scale",
)  # fmt: skip


class QuantizedTensors(Mapping[str, Tensor]):
    """The tensors of a quantized checkpoint under the original's names, decoded to `dtype` on access.

    Codes without scales, or scales without codes, are a UserError that names the tensor and its file.
    """

    def __init__(self, shards: Sequence[Path], quantization: Quantization, dtype: torch.dtype) -> None:
        if wrong := [shard for shard in shards if shard.suffix != ".safetensors"]:
            raise UserError(f"{wrong[0]}: a quantized checkpoint as a pickle; get it as safetensors")
        self.dtype = dtype
        self._files = {shard: safetensors_file(shard, "pt") for shard in shards}
        self.home = {name: shard for shard, file in self._files.items() for name in file.keys()}  # noqa: SIM118
        self.packed: dict[str, Packed] = {}
        for name in self.home:
            if (tensor := FIND[QuantMethod(quantization.method)](name, self, quantization)) is not None:
                self.packed[tensor[0]] = tensor[1]
        used = {part for packed in self.packed.values() for part in packed.parts.values()}
        self._plain = [n for n in self.home if n not in used and n.rpartition(".")[2] not in _RUN_TIME]
        for shard, file in self._files.items():
            plain = {name: self.stored_dtype(name) for name in self._plain if self.home[name] is shard}
            refuse_packed(shard, plain, set(file.keys()), f", though the config says {quantization}; download it again")

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.packed:
            return self.read(name)
        if len(shape := self.packed[name].shape) == 2:
            return self.matrix(name)
        # Matrix by matrix: decoding goes through float32, of which only one expert's is in memory.
        out = torch.empty(shape, dtype=self.dtype)
        for index in range(shape[0]):
            out[index] = self.matrix(name, index)
        return out

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor without reading its values."""
        return self.packed[name].shape if name in self.packed else self.stored_shape(name)

    def matrix(self, name: str, index: int | None = None) -> Tensor:
        """Returns a packed matrix, or one of a packed stack."""
        packed = self.packed[name]
        parts = {part: self.read(on_disk, index) for part, on_disk in packed.parts.items()}
        try:
            return packed.decode({part: in_memory(tensor) for part, tensor in parts.items()}, self.dtype)
        except (ValueError, RuntimeError, IndexError, KeyError) as error:
            file = self.home[next(iter(packed.parts.values()))]
            raise UserError(f"{file}: {name} cannot be dequantized: {error}; download the model again") from error

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Returns a tensor as it is on disk, or one matrix of a stack."""
        file = self._files[self.home[name]]
        return file.get_tensor(name) if index is None else file.get_slice(name)[index]

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor as it is on disk."""
        return tuple(self._files[self.home[name]].get_slice(name).get_shape())

    def stored_dtype(self, name: str) -> str:
        """Returns the dtype of a tensor on disk, as safetensors names it."""
        return str(self._files[self.home[name]].get_slice(name).get_dtype())

    def __iter__(self) -> Iterator[str]:
        return iter([*self._plain, *self.packed])

    def __len__(self) -> int:
        return len(self._plain) + len(self.packed)

    def deferred(self) -> dict[str, Any]:
        """Returns all tensors as transformers' loader takes them: each is read when it is indexed with `...`."""
        return {name: _Deferred(self, name) for name in self}


class Renamed:
    """The tensors under the names that they have in a model, as `stored_weights.Files` are."""

    def __init__(self, tensors: QuantizedTensors, rename: Callable[[str], str]) -> None:
        self.tensors = tensors
        self.names = {rename(name): name for name in tensors}

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.names[name]]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors.shape(self.names[name])

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors.dtype if not self.is_mapped(name) else self[name].dtype

    def is_mapped(self, name: str) -> bool:
        return self.names[name] not in self.tensors.packed

    def matrix(self, name: str, index: int) -> Tensor:
        return self.tensors.matrix(self.names[name], index)


@dataclass(frozen=True)
class _Deferred:
    # transformers' loader takes lazy tensors of safetensors, of which it uses only indexing.
    tensors: QuantizedTensors
    name: str

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensors[self.name][index]


@dataclass(frozen=True, eq=False)
class Packed:
    """A tensor of the original checkpoint that the file holds as codes and scales."""

    shape: tuple[int, ...]  # of the original
    parts: Mapping[str, str]  # the names on disk of the parts, by role: weight, weight_scale, qzeros …
    decode: Callable[[Parts, torch.dtype], Tensor]  # computes the tensor, or one matrix of a stack


# Which names in the files together hold one tensor of the original: each function takes the name of a tensor on disk.
# Where that is the first part of a quantized tensor, it returns the original's name and its parts; else None.
Found = tuple[str, Packed]


def _find_scaled(name: str, tensors: QuantizedTensors, quantization: Quantization) -> Found | None:
    """Returns `X` with `X_scale` or `X_scale_inv`, or `X_packed`; `X` may be stacked experts."""
    original = name.removesuffix("_packed")
    # DeepSeek's `weight_scale_inv` is not a reciprocal in spite of its name: codes are multiplied by it, as by
    # `weight_scale`.
    scale = next((f"{original}{s}" for s in ("_scale_inv", "_scale") if f"{original}{s}" in tensors.home), None)
    if scale is None or tensors.stored_dtype(name) not in CODES:
        return None
    parts = {"weight_packed" if name != original else "weight": name, "weight_scale": scale}
    suffixes = ("_scale_2", "_global_scale", "_zero_point", "_g_idx")
    parts |= {f"weight{s}": f"{original}{s}" for s in suffixes if f"{original}{s}" in tensors.home}
    if f"{original.removesuffix('weight')}pre_quant_scale" in tensors.home:
        raise UserError(f"{quantization.path}: {original} is scaled for scaled inputs (pre_quant_scale); {WAY_OUT}")
    shape, scales = tensors.stored_shape(name), tensors.stored_shape(scale)
    if len(shape) < 2 or (tensors.stored_dtype(name) in ("I32", "U8") and not scales):
        raise UserError(
            f"{tensors.home[name]}: {name} {list(shape)} with {scale} {list(scales)} is not a quantized weight: its "
            "codes are a matrix, and packed ones have a scale for each group; download the checkpoint again"
        )
    # Words of 32 bits hold several codes, and a row may end in padding; `weight_shape` is the original's shape.
    if tensors.stored_dtype(name) == "I32":
        shape_name = f"{original}_shape"
        parts["weight_shape"] = shape_name
        words = shape[-1]
        shape = tuple(map(int, tensors.read(shape_name).tolist())) if shape_name in tensors.home else shape
        _check_bits(32 * words // shape[-1], original, quantization)
        # A last group may be short if the config names the size.
        sizes = [weights.get("group_size") for weights in quantization.groups]
        size = next((s for s in sizes if s and -(-shape[1] // s) == scales[-1]), shape[1] // scales[-1])
        decode: Any = partial(pack_quantized, shape=shape, group_size=size)
        return original, Packed(shape, parts, decode)
    # ModelOpt packs INT4 along the outputs: a byte holds a code of each of two rows, so there are half as many rows of
    # bytes as rows of scales. All others pack along the inputs.
    if tensors.stored_dtype(name) == "U8" and len(scales) == 2 and scales[0] == 2 * shape[0]:  # ModelOpt's INT4
        shape = (scales[0], shape[1])
    elif tensors.stored_dtype(name) == "U8":
        # A row of bytes has codes of 4 bits, or of 6, where 32 of them have a scale.
        of_six = "weight_packed" in parts and shape[-1] == 24 * scales[-1]
        shape = (*shape[:-1], shape[-1] * 8 // 6 if of_six else 2 * shape[-1])
    return original, Packed(shape, parts, partial(scaled, blocks=quantization.blocks))


def _find_mxfp4(name: str, tensors: QuantizedTensors, quantization: Quantization) -> Found | None:
    """Returns `X_blocks` `[experts, out, in/32, 16]` and `X_scales`."""
    original = name.removesuffix("_blocks")
    if name == original or f"{original}_scales" not in tensors.home:
        return None
    experts, out, groups, octets = tensors.stored_shape(name)
    # 16 bytes are a block of 32 codes, so the inputs are 2 · groups · octets. gpt-oss has the original as `[experts,
    # in, out]`, and the blocks as `[experts, out, in]`.
    parts = {"blocks": name, "scales": f"{original}_scales"}
    return original, Packed((experts, 2 * groups * octets, out), parts, mxfp4_experts)


def _find_words(name: str, tensors: QuantizedTensors, quantization: Quantization) -> Found | None:
    """Returns `qweight`, `qzeros` and `scales`, and perhaps `g_idx`, in the place of `weight`."""
    stem, _, last = name.rpartition(".")
    if last != "qweight":
        return None
    parts = {part: f"{stem}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
    parts = {part: stored for part, stored in parts.items() if stored in tensors.home}
    if missing := {"qzeros", "scales"} - set(parts):
        raise UserError(f"{quantization.path}: {name} has no {listed(sorted(missing))}; download the model again")
    if (words := tensors.stored_dtype(name)) != "I32":  # GPTQModel's `pack_dtype`
        raise UserError(f"{quantization.path}: {name} has words in {words}; those in I32 can be read: {WAY_OUT}")
    out = tensors.stored_shape(parts["scales"])[1]
    bits = 32 * tensors.stored_shape(parts["qzeros"])[1] // out
    _check_bits(bits, name, quantization)
    # qweight has a code for each weight, whichever axis it is packed along.
    count = 32 // bits * prod(tensors.stored_shape(name)) // out
    if quantization.method == QuantMethod.AWQ:
        return f"{stem}.weight", Packed((out, count), parts, awq)
    # GPTQ's first version stores zeros less one; configs without a version mean that one.
    layout = quantization.config.get("checkpoint_format") or quantization.config.get("format")
    less_one = str(layout).lower() != "gptq_v2"
    return f"{stem}.weight", Packed((out, count), parts, partial(gptq, zeros_less_one=less_one))


def _check_bits(bits: int, name: str, quantization: Quantization) -> None:
    if bits not in (2, 4, 8):
        raise UserError(f"{quantization.path}: {name} has codes of {bits} bits; 2, 4 and 8 can be read: {WAY_OUT}")


_ELEMENTS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, torch.int8: INT8}
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
_CHUNK_ELEMENTS = 1 << 20


def scaled(parts: Parts, dtype: torch.dtype, blocks: Iterable[Block]) -> Tensor:
    """Returns a matrix of floating-point or INT8 codes with scales, under compressed-tensors' or ModelOpt's names.

    `blocks` are the (rows, columns) that the config says share a scale, where 0 is the whole axis.
    """
    codes, scale = parts["weight_packed" if "weight_packed" in parts else "weight"], parts["weight_scale"]
    scale = scale.float() if scale.dtype == torch.float8_e8m0fnu else scale
    parts = {**parts, "weight_scale": scale}
    if "weight_zero_point" in parts or "weight_g_idx" in parts or "fnuz" in str(codes.dtype):
        rows, columns = codes.shape
        grid = _grid(scale.shape, (rows, columns))
        height, width = _block((rows, columns), grid, blocks)
        both = (parts.get("weight_zero_point", torch.zeros_like(scale)), scale)
        zero, scale = (part.reshape(grid).repeat_interleave(height or rows, 0)[:rows] for part in both)
        return _affine(codes, zero, scale, _groups(parts.get("weight_g_idx"), columns, width), dtype)
    format = _format_of(codes, scale, "weight_scale_2" in parts or "weight_global_scale" in parts, blocks)
    return layout_of_tensors(parts).decompress(parts, format)[0].dequantize(dtype)


def _format_of(codes: Tensor, scale: Tensor, second: bool, blocks: Iterable[Block]) -> Format:
    if codes.dtype == torch.uint8 and scale.dim() == 2 and scale.shape[0] == 2 * codes.shape[0]:  # ModelOpt's INT4
        return Format("source", INT4, FP32, (1, codes.shape[1] // scale.shape[1]))
    # Scales of one byte are E4M3 (NVFP4) or exponents (MX, in E8M0 or uint8).
    number = FP32 if scale.dtype.itemsize > 1 else E4M3 if scale.dtype == torch.float8_e4m3fn else E8M0
    if codes.dtype != torch.uint8:
        shape = (codes.shape[0], codes.shape[1])
        grid = _grid(scale.shape, shape)
        if number is E8M0:
            blocks = [(1, 32), *blocks]
        return Format("source", _ELEMENTS[codes.dtype], number, _block(shape, grid, blocks))
    if not second and 3 * 8 * scale.shape[-1] == codes.shape[-1]:  # 32 codes of 6 bits
        return FORMATS["mxfp6"]
    return Format("source", E2M1, number, (1, 2 * codes.shape[-1] // scale.shape[-1]), global_scale=second)


def _grid(scale: Sequence[int], shape: tuple[int, int]) -> tuple[int, int]:
    """Returns the rows and columns of scales: `[]`, `[1]`, `[out]`, `[out, 1]`, or blocks in 2 or 4 dimensions."""
    sizes = list(scale)
    if len(sizes) in (2, 4):
        return sizes[0], sizes[len(sizes) // 2]
    if sizes == [shape[0]]:
        return shape[0], 1
    return (1, 1) if sizes in ([], [1]) else (0, 0)


def _block(shape: tuple[int, int], grid: tuple[int, int], declared: Iterable[Block]) -> Block:
    """Returns the block for which a matrix of `shape` has `grid` scales; a last block may be short."""
    blocks = ((0, 0), (1, 0), *declared)
    for rows, columns in blocks:
        if grid == (ceil(shape[0] / (rows or shape[0])), ceil(shape[1] / (columns or shape[1]))):
            return rows, columns
    raise ValueError(f"{list(grid)} scales for {list(shape)} weights fit none of the blocks {list(blocks)}")


def mxfp4_experts(parts: Parts, dtype: torch.dtype) -> Tensor:
    """Returns the matrix `[in, out]` of a gpt-oss expert from `blocks [out, in/32, 16]` and `scales [out, in/32]`."""
    matrix = {"weight": parts["blocks"].flatten(-2), "weight_scale": parts["scales"]}
    return modelopt.decompress(matrix, FORMATS["mxfp4"])[0].dequantize(dtype).t().contiguous()


def gptq(parts: Parts, dtype: torch.dtype, zeros_less_one: bool) -> Tensor:
    """Returns a matrix `[out, in]` in GPTQ's layout; `zeros_less_one` is the layout's first version."""
    bits = 32 * parts["qzeros"].shape[1] // parts["scales"].shape[1]
    words = parts["qzeros"]
    if zeros_less_one:
        words = words + sum(1 << shift for shift in range(0, 31, bits))
    # qweight packs along inputs, qzeros along outputs.
    zero = unpack_words(words, bits).flatten(-2)
    codes = unpack_words(parts["qweight"], bits).transpose(0, 1).flatten(1)
    groups = _groups(parts.get("g_idx"), codes.shape[1], ceil(codes.shape[1] / len(zero)))
    return _affine(codes, zero.t(), parts["scales"].t(), groups, dtype)


def awq(parts: Parts, dtype: torch.dtype) -> Tensor:
    """Returns a matrix `[out, in]` in AWQ's layout for "gemm"."""
    order = torch.tensor(_AWQ_COLUMNS, device="cpu").argsort()
    codes, zero = (unpack_words(parts[name], 4)[..., order].flatten(-2).t() for name in ("qweight", "qzeros"))
    groups = _groups(None, codes.shape[1], ceil(codes.shape[1] / zero.shape[1]))
    return _affine(codes, zero, parts["scales"].t(), groups, dtype)


def pack_quantized(parts: Parts, dtype: torch.dtype, shape: Sequence[int], group_size: int) -> Tensor:
    """Returns a matrix of `shape` `[out, in]` in compressed-tensors' layout of integers."""
    (rows, columns), packed, scale = shape, parts["weight_packed"], parts["weight_scale"]
    scale = scale.reshape(-1, scale.shape[-1])
    bits = 32 * packed.shape[1] // columns
    codes = unpack_words(packed, bits).flatten(-2)[:, :columns]
    if "weight_zero_point" in parts and parts["weight_zero_point"].dtype == torch.int32:
        zero = unpack_words(parts["weight_zero_point"], bits).transpose(1, 2).flatten(0, 1)[:rows]
    else:
        # Codes are stored with an offset of half their range; the zero point of a whole matrix is stored without it.
        zero = torch.full(scale.shape, 1 << (bits - 1), dtype=torch.int32, device="cpu")
        zero = zero + parts.get("weight_zero_point", 0)
    groups = _groups(parts.get("weight_g_idx"), columns, group_size if scale.shape[1] > 1 else 0)
    return _affine(codes, zero.expand(rows, -1), scale.expand(rows, -1), groups, dtype)


def _groups(groups: Tensor | None, columns: int, size: int) -> Tensor:
    """Returns the stored `groups` of inputs, or else groups of `size` inputs in their order, 0 for all."""
    # compressed-tensors wrote -1 where an order had been asked for and none was found.
    if groups is None or bool((groups == -1).any()):
        return torch.arange(columns, device="cpu") // (size or columns)
    return groups.long()


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Returns codes in int32 words `[…]`, lowest bits first: uint8 `[…, 32 / bits]`."""
    # Byte by byte, which needs no int32 shifts: 2, 4 and 8 bits divide a byte, and words are little-endian.
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device="cpu")
    octets = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    return ((octets.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _affine(codes: Tensor, zero: Tensor, scale: Tensor, groups: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `scale · (code − zero)`; codes `[out, in]`, zeros and scales `[out, groups]`, the group of each input."""
    rows, columns = codes.shape
    out = torch.empty(rows, columns, dtype=dtype, device="cpu")
    # Chunks of rows bound the temporaries in float32 to 4 MB each.
    step = max(_CHUNK_ELEMENTS // columns, 1)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        centred = codes[part].float().sub_(zero[part].float()[:, groups])
        out[part] = centred.mul_(scale[part].float()[:, groups])
    return out


_FIND_OTHERS = {QuantMethod.MXFP4: _find_mxfp4, QuantMethod.GPTQ: _find_words, QuantMethod.AWQ: _find_words}
FIND = {method: _FIND_OTHERS.get(method, _find_scaled) for method in QuantMethod}
