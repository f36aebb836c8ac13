"""An exception that nobody expected names the code that it came from."""

import re
import signal
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from samples import ROOT

from quant.base import errors
from quant.cli.command import Command, Terminated, terminable

transformers = pytest.importorskip("transformers")


def line_of(raising: Callable[[], Any]) -> str:
    """The line that a command prints where its work raises."""
    result = CliRunner().invoke(Command("work", callback=raising))
    assert result.exit_code == 70
    return result.output.strip()


def written_in(module: str, body: str, file: str = "modeling_made.py") -> Callable[[], Any]:
    """The function `fail` of a module that has another module's name, as a traceback shows it."""
    made = types.ModuleType(module)
    exec(compile(f"import torch\ndef fail():\n    {body}\n", file, "exec"), made.__dict__)
    return made.fail


def test_transformers_own_code_is_named_with_its_version() -> None:
    def run() -> None:
        config = transformers.LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
        transformers.LlamaForCausalLM(config)(torch.zeros(1, 2))  # an embedding of fractions, which torch refuses

    line = line_of(run)
    assert line.startswith(f"error: transformers {transformers.__version__} fails in its own ")
    assert re.search(r"\(RuntimeError at modeling_\w+\.py:\d+: .*embedding", line) and "Blockscale" not in line


def test_the_python_files_of_a_model_are_named() -> None:
    line = line_of(written_in("transformers_modules.org.modeling_made", "return torch.zeros(2) @ torch.zeros(3)"))
    assert re.match(r"error: the model's own Python files fail in fail \(RuntimeError at modeling_made.py:3: ", line)


def test_our_code_is_named_as_ours_where_transformers_calls_it() -> None:
    hook = written_in("quant.run.made", "return torch.zeros(2) @ torch.zeros(3)")
    caller = written_in("transformers.made", "return hook()")
    caller.__globals__["hook"] = hook
    line = line_of(caller)
    assert line.startswith(
        "error: this is a bug in Blockscale: run with --debug, and report what that prints (RuntimeError"
    )


def test_our_warnings_are_lines_where_python_makes_errors_of_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.warnoptions", ["error"])
    file = str(Path(errors.__file__).parents[1] / "made.py")
    warns = written_in("quant.made", "warn('layer 3 stays in 16 bit')", file)
    warns.__globals__["warn"] = errors.warn
    with warnings.catch_warnings(action="error"):
        result = CliRunner().invoke(Command("work", callback=warns))
    assert (result.exit_code, result.output) == (0, "warning: layer 3 stays in 16 bit\n")


def test_a_warning_of_a_library_that_python_makes_an_error_is_named() -> None:
    def run() -> None:
        with warnings.catch_warnings(action="error"):
            warnings.warn("`old` is deprecated", DeprecationWarning, stacklevel=1)

    result = CliRunner().invoke(Command("work", callback=run))
    expected = "error: -W or PYTHONWARNINGS makes an error of a warning: `old` is deprecated (DeprecationWarning at "
    assert result.exit_code == 2 and result.output.startswith(expected)


@pytest.mark.parametrize("kind", ["OSError", "ImportError", "nothing"])
def test_a_torch_that_cannot_be_imported_is_named(kind: str, tmp_path: Path) -> None:
    reason = "libcudart.so.13: cannot open shared object file"
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; sys.argv[:] = ['quant', 'doctor']\n"
    if kind == "nothing":
        code += "sys.modules['torch'] = None\n"
        reason = "import of torch halted; None in sys.modules"  # as Python words it here
    else:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text(f"raise {kind}({reason!r})\n")
        code += f"sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "from quant.__main__ import quant; quant()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    way_out = "install it again as pytorch.org says: pip install torch"
    assert result.returncode == 2
    assert result.stderr.strip() == f"error: PyTorch cannot be imported ({reason}); {way_out}"


@pytest.fixture
def _heard() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt; a shell's jobs in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heard")
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
@pytest.mark.parametrize("answer", [RecursionError("while an import was interrupted"), None])
def test_code_that_answers_a_signal_by_an_error_of_its_own(
    number: int, expected: type[BaseException], answer: Exception | None
) -> None:
    """Ctrl-C while transformers was imported ended as "a bug in Blockscale": a RecursionError of its lazy modules."""

    def interrupted() -> None:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            if answer is not None:
                raise answer from None

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(expected) as caught, terminable():
        interrupted()
    assert type(caught.value) is expected
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    with pytest.raises(RecursionError), terminable():  # without a signal it is an error as any other
        raise RecursionError
