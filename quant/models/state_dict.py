"""A state dict is names and tensors without a module, in a file of safetensors or torch.save; a factory makes a model.

A pickle is a program, and `torch.load(weights_only=True)` runs only the few instructions that tensors need. Files are
read only that way unless the user asks for the unsafe one. `torch.export.load` has no such mode: it unpickles sample
inputs and constants, evaluates the expressions of dynamic shapes as Python, and generates code from the graph. An
exported program is therefore opened only where the user trusts it.

Such a program has no layers: its graph reads parameters and calls functions on them.

    f_weight = get_attr[f.weight];  f_bias = get_attr[f.bias];  y = aten.linear(x, f_weight, f_bias)

Quantization replaces modules, so `restore_linears` makes each such call a call of an `nn.Linear` with the same
parameters under the same names, `y = call_module[f](x)`. The graph computes the same as before.
"""

import importlib
import importlib.util
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from quant.base.errors import UserError, did_you_mean, listed, option, warn
from quant.export.checkpoint.files.tensor_file import DTYPE_NAMES
from quant.models.files import SourceKind, safetensors_file
from quant.models.quantized_tensors import refuse_packed

_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts of names that DDP, torch.compile, FSDP and activation checkpointing add."""
_KNOWN = "a Hugging Face directory, .gguf, .safetensors, .pt/.pth/.bin (torch.save) or .pt2 (torch.export.save)"


class LazyStateDict(Mapping[str, Tensor]):
    """A state dict whose tensors are read by `read`, and floating-point ones cast to a `dtype`, on access."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Tensor], dtype: torch.dtype | None = None) -> None:
        self._names, self._read, self._dtype = dict.fromkeys(names), read, dtype

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor = self._read(name)
        return tensor.to(self._dtype) if self._dtype is not None and tensor.dtype.is_floating_point else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def sniff(path: Path) -> SourceKind:
    """Returns the kind of a file, by its first bytes; UserError for nothing that is known, or a TorchScript archive."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if not size:
        raise UserError(f"{path}: the file is empty; expected {_KNOWN}")
    if head[:4] == b"GGUF":
        return SourceKind.GGUF
    if head[:4] == b"PK\x03\x04":
        return _sniff_zip(path)
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):  # pickle protocols
        return SourceKind.TORCH
    # A safetensors file begins with the length of its header (8 bytes, little-endian) and JSON. The suffix counts, too:
    # a damaged header is then reported as one, and not as an unknown file type.
    if head[8:9] == b"{" or path.suffix == ".safetensors":
        return SourceKind.SAFETENSORS
    if path.suffix == ".json":
        raise UserError(f"{path}: holds no weights; name the directory of the model")
    raise UserError(f"{path}: unknown file type (it starts with {head[:8]!r}); expected {_KNOWN}")


def _sniff_zip(path: Path) -> SourceKind:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
            packed = next((each.filename for each in archive.infolist() if each.compress_type), None)
    except zipfile.BadZipFile:
        raise UserError(f"{path}: a truncated or damaged archive; copy or download it again") from None
    # torch.save puts all members into one folder, which is named after the file.
    tails = {member.partition("/")[2] or member for member in members}
    if "archive_format" in tails or "serialized_exported_program.json" in members:
        return SourceKind.EXPORTED
    if "constants.pkl" in tails:
        raise UserError(
            f"{path}: a TorchScript archive, which has no modules to quantize; save the original model's "
            "state_dict() with torch.save, or the model with torch.export.save"
        )
    if "data.pkl" in tails:
        if packed is not None:
            raise UserError(
                f"{path}: {packed} is compressed, which torch.save never does and which may fill the memory; save the "
                "state_dict() again with torch.save"
            )
        return SourceKind.TORCH
    raise UserError(f"{path}: a zip archive, but not one that torch wrote; expected {_KNOWN}")


def open_safetensors(path: Path, dtype: torch.dtype | None, meta: bool) -> LazyStateDict:
    """Returns the tensors of one file, mapped and read on access; with `meta` on the meta device, from the header."""
    file = safetensors_file(path, "pt")
    refuse_packed(path, {name: str(file.get_slice(name).get_dtype()) for name in file.keys()})  # noqa: SIM118

    def read(name: str) -> Tensor:
        part = file.get_slice(name)
        if part.get_dtype().startswith(("F4", "F6_")):
            raise UserError(f"{path}: {name} has dtype {part.get_dtype()}, packed already; give the original model")
        if not meta:
            return file.get_tensor(name)
        shape = part.get_shape()
        like = part[:0] if shape else file.get_tensor(name)  # for its dtype
        return torch.empty(shape, dtype=like.dtype, device="meta")

    return LazyStateDict(file.keys(), read, dtype)


def build(factory: str, tensors: Mapping[str, Tensor], where: str, meta: bool) -> nn.Module:
    """Returns the module that `factory` makes, holding `tensors`: their memory and dtype, not the factory's.

    Parameters that the factory ties stay tied; the file needs only one of their names, which may have the parts that
    wrappers of PyTorch add: `module.` of DDP, `_orig_mod.` of torch.compile. Errors call the state dict `where`.
    """
    model = call_factory(factory, meta=meta)
    shared: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    # By each name all names of the same parameter: a file with one of them fills them all.
    ties = {name: names for names in shared.values() for name in names}
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    original = {}
    for name in tensors:
        plain = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        original[plain if name not in expected and plain in expected else name] = name
    renamed = LazyStateDict(original, lambda name: tensors[original[name]])
    stored = {name: next((n for n in ties.get(name, [name]) if n in renamed), None) for name in expected}
    _refuse(f"{where} lacks", [name for name, stored_name in stored.items() if stored_name is None], factory)
    _refuse(f"{where} has, and the module has not:", [name for name in renamed if name not in expected], factory)
    values = {name: renamed[stored_name] for name, stored_name in stored.items() if stored_name is not None}
    for name, shape in expected.items():
        if values[name].shape != shape:
            raise UserError(f"{where}: {name} is {list(values[name].shape)}, and {factory} makes it {list(shape)}")
        if name in renamed and stored[name] != name and not meta and not torch.equal(renamed[name], values[name]):
            raise UserError(f"{where}: {factory} ties {name} to {stored[name]}, but the file's tensors differ")
    # `assign` keeps the file's mapped memory and dtype. It makes a parameter of each name, so ties are made again.
    model.load_state_dict(values, assign=True)
    for first, *other_names in shared.values():
        for name in other_names:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, model.get_parameter(first))
    return model.eval()


def call_factory(factory: str, *, meta: bool = False) -> nn.Module:
    """Returns the module that "package.module:function" or "file.py:function" builds, on the meta device if asked.

    Modules are also found in the current folder, as `python -m` finds them, and what a file imports beside it.
    """
    module_name, _, function = factory.rpartition(":")
    named = option("model_factory", factory)
    if not module_name or not function:
        raise UserError(f"{named}: expected package.module:function, or file.py:function")
    file = Path(module_name)
    try:
        with _on_path(Path.cwd()):
            module = _imported_file(file) if file.suffix == ".py" else importlib.import_module(module_name)
        make = getattr(module, function, None)
        with torch.device("meta" if meta else "cpu"):
            model = make() if callable(make) else None
    except ImportError as error:
        raise UserError(
            f"{named}: cannot import {module_name} ({error}); name a module that is in the current folder or on "
            "PYTHONPATH, or a file, as in nets.py:build"
        ) from error
    except Exception as error:  # of the user's code
        raise UserError(f"{named} fails when called without arguments: {type(error).__name__}: {error}") from error
    if not callable(make):
        near = did_you_mean(function, [name for name, value in vars(module).items() if callable(value)])
        raise UserError(f"{named}: {module_name} has no function {function}{near}")
    if not isinstance(model, nn.Module):
        raise UserError(f"{named} returned a {type(model).__name__}; expected an nn.Module")
    return model


def _imported_file(file: Path) -> ModuleType:
    """Imports a file, under a name that no module of another file has."""
    if not file.is_file():
        raise ImportError("no such file")
    name = f"_factory_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with _on_path(file.resolve().parent):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _refuse(problem: str, names: list[str], factory: str) -> None:
    if names:
        raise UserError(
            f"{problem} {listed(names, 5)} (module from {factory}); make the factory's module match the file"
        )


def restore_linears(model: nn.Module) -> None:
    """Makes modules of the calls of `aten.linear` that are the only readers of their weight and bias."""
    if not isinstance(model, GraphModule):
        return
    calls: dict[str, list[Node]] = {}
    for node in model.graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.aten.linear.default:
            calls.setdefault(_module_path(node), []).append(node)
    for path, nodes in calls.items():
        if path and all(_are_only_readers(node, nodes) for node in nodes):
            _restore_linear(model, path, nodes)
    model.graph.lint()
    model.recompile()


def _module_path(call: Node) -> str:
    """Returns the path of the module with a call's parameters: `a` for `a.weight` and `a.bias`; empty for none."""
    weight, bias = call.args[1], call.args[2] if len(call.args) > 2 else None
    if not isinstance(weight, Node) or weight.op != "get_attr" or call.kwargs:
        return ""
    path, _, last = str(weight.target).rpartition(".")
    if last != "weight" or (bias is not None and (not isinstance(bias, Node) or bias.target != f"{path}.bias")):
        return ""
    return path


def _are_only_readers(call: Node, calls: list[Node]) -> bool:
    """Returns whether only `calls`, which share their parameters, read them."""
    parameters = [node for node in call.args[1:] if isinstance(node, Node)]
    targets = [node.target for node in parameters]
    reads = [node for node in call.graph.nodes if node.op == "get_attr" and node.target in targets]
    same = all([n.target for n in other.args[1:] if isinstance(n, Node)] == targets for other in calls)
    return same and all(user in calls for node in reads for user in node.users)


def _restore_linear(model: GraphModule, path: str, calls: list[Node]) -> None:
    held: Any = model.get_submodule(path)
    weight, bias = held.weight, getattr(held, "bias", None)
    # The constructor would fill a matrix with random numbers, only for the next line to replace it.
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight, linear.bias = weight, bias  # type: ignore[assignment]
    model.set_submodule(path, linear.train(model.training))
    for call in calls:
        with model.graph.inserting_before(call):
            new = model.graph.call_module(path, (call.args[0],))
        # `meta` holds the call's fake tensor and stack trace, which later passes over the graph rely on.
        new.meta = call.meta
        call.replace_all_uses_with(new)
        read = [node for node in call.args[1:] if isinstance(node, Node)]
        model.graph.erase_node(call)
        # A get_attr that nobody reads names the 16-bit parameter, which goes when the module is quantized.
        for node in read:
            if not node.users:
                model.graph.erase_node(node)


_CHECKPOINT_KEYS = ("state_dict", "model_state_dict", "model")


def load_pickle(
    path: Path, dtype: torch.dtype | None, unsafe: bool, meta: bool
) -> tuple[nn.Module | None, LazyStateDict | None]:
    """Returns the module or the state dict in a `torch.save` file, exactly one; `unsafe` admits more than tensors."""
    content = _unpickle(path, unsafe)
    while isinstance(content, Mapping):  # a training checkpoint {"model": …, "optimizer": …}
        key = next((k for k in _CHECKPOINT_KEYS if isinstance(content.get(k), Mapping | nn.Module)), None)
        if key is None:
            break
        outer, content = content, content[key]
        names = set(content) if isinstance(content, Mapping) else set()
        alike = [str(k) for k, v in outer.items() if k != key and isinstance(v, Mapping) and names and set(v) == names]
        if alike:  # averages (EMA) beside the weights
            warn(f"{path}: its {key!r} is read, not {listed(alike, 3)} of the same names; save what you want by itself")
    if isinstance(content, nn.Module):
        return (content.to("meta") if meta else content).to(dtype).eval(), None
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: holds a {type(content).__name__}; expected a state dict or an nn.Module")
    not_tensors = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if not_tensors or not content:
        fault = f"{', '.join(not_tensors[:3])} is not a tensor" if not_tensors else "it is empty"
        raise UserError(f"{path}: not a state dict ({fault}); save model.state_dict(), or wrap it as 'state_dict'")
    tensors = {str(name): tensor.detach() for name, tensor in content.items()}
    if sparse := next((name for name, tensor in tensors.items() if tensor.layout != torch.strided), None):
        raise UserError(f"{path}: {sparse} is sparse ({tensors[sparse].layout}); save its to_dense() in its place")
    refuse_packed(path, {name: DTYPE_NAMES.get(tensor.dtype, "") for name, tensor in tensors.items()})
    if meta:
        tensors = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    return None, LazyStateDict(tensors, tensors.__getitem__, dtype)


def _unpickle(path: Path, unsafe: bool) -> Any:
    # Only the zip layout can be mapped; the layout before torch 1.6 is one stream of pickles. torch.load would open a
    # path that ends in .safetensors as such a file.
    mapped = zipfile.is_zipfile(path) and path.suffix != ".safetensors"
    try:
        with path.open("rb") as file:
            return torch.load(path if mapped else file, map_location="cpu", mmap=mapped, weights_only=not unsafe)
    except pickle.UnpicklingError:
        if unsafe:
            raise UserError(f"{path}: a damaged pickle; copy or download it again") from None
        raise UserError(
            f"{path}: holds more than tensors, and unpickling it would run its code; save model.state_dict() instead, "
            f"or, if you trust its author, pass {option('unsafe_load', True)}"
        ) from None
    except (AttributeError, ImportError) as error:
        raise UserError(f"{path}: its classes cannot be imported ({error}); save model.state_dict() instead") from None
    except Exception as error:  # a damaged pickle can make the unpickler raise anything
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path}: truncated or damaged ({reason}); copy or download it again") from None


def load_exported(path: Path, dtype: torch.dtype | None, unsafe: bool) -> nn.Module:
    """Returns the module of a `torch.export.save` archive that is trusted, with its linear layers as modules again."""
    if not unsafe:
        raise UserError(
            f"{path}: opening an exported program runs code that it holds; if you trust its author, pass "
            f"{option('unsafe_load', True)}, or save model.state_dict() as safetensors and pass that with "
            f"{option('model_factory')}"
        )
    try:
        model = torch.export.load(path).module()
    except Exception as error:  # a damaged archive can make the deserializer raise anything
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{path}: not a readable exported program ({reason}); export it again with this torch"
        ) from error
    if dtype is not None and any(p.dtype != dtype for p in model.parameters() if p.is_floating_point()):
        raise UserError(f"{path}: an exported program cannot be cast to {dtype}; export the model in that dtype")
    restore_linears(model)
    # Its graph computes as it was exported; torch raises an error even if its mode would not change.
    model.eval = MethodType(lambda model: model, model)  # type: ignore[method-assign]
    return model
