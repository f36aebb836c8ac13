"""Every public name of `quant` leads to its definition, for Python and for editors, and no file takes its place."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import quant
from quant.base import old_names

ROOT = Path(__file__).parents[1]
_USER = """
import quant

reveal_type(quant.quantize)
reveal_type(quant.Plan.load("plan.json").layers[0].name)
quant.evaluate(None, None, text="no such keyword")
"""


def test_at_most_forty_names() -> None:
    assert len(set(quant.__all__) - {"__version__"}) <= 40


def test_no_module_hides_a_public_name() -> None:
    """An imported submodule becomes an attribute of its package, which comes before `__getattr__`."""
    submodules = {path.stem for path in Path(quant.__path__[0]).iterdir()}
    assert submodules.isdisjoint(quant.__all__)


@pytest.mark.parametrize("name", sorted(set(quant.__all__) - {"__version__", "FORMATS"}))
def test_a_public_name_is_a_definition_of_the_file_that_the_table_names(name: str) -> None:
    if name == "QATCallback":
        pytest.importorskip("lightning", reason="the extra lightning")
    definition = getattr(quant, name)
    assert (definition.__name__, definition.__module__) == (name, quant._HOME[name])


def test_editors_see_the_names_of_the_table() -> None:
    imports = [n for n in ast.parse(Path(quant.__file__ + "i").read_text()).body if isinstance(n, ast.ImportFrom)]
    # `import x as x` is what marks a name as exported for type checkers.
    assert all(alias.asname == alias.name for node in imports for alias in node.names)
    assert {alias.name: node.module for node in imports for alias in node.names} == quant._HOME
    assert set(quant.__all__) == {"__version__", *quant._HOME}


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_type_checker_checks_calls_of_users(checker: str, tmp_path: Path) -> None:
    """The examples are well typed as far as `quant` goes, and a wrong keyword in a user's call is an error."""
    user = tmp_path / "user.py"
    user.write_text(_USER)
    examples = sorted(str(path) for path in (ROOT / "examples").glob("*.py"))
    if checker == "mypy":
        (tmp_path / "mypy.ini").write_text("[mypy]\nignore_missing_imports = True\nfollow_imports = silent\n")
        command = ["mypy", f"--config-file={tmp_path / 'mypy.ini'}", f"--cache-dir={ROOT / '.mypy_cache' / 'users'}"]
        output = _checked([*command, "--scripts-are-modules", str(user), *examples])
        # mypy stops at the first of two modules of one name; the examples are scripts with names of their own.
        assert 'Revealed type is "def (model: torch.nn.modules.module.Module' in output, output
        assert 'user.py:5: note: Revealed type is "str"' in output, output
        assert 'user.py:6: error: Unexpected keyword argument "text"' in output, output
        assert not [line for line in output.splitlines() if "examples/" in line and '"quant"' in line], output
    else:
        pytest.importorskip("pyright", reason="pyright is not installed")
        output = _checked(["pyright", f"--pythonpath={sys.executable}", str(user)])
        if "quantize" not in output:
            pytest.skip("pyright is installed, and its Node.js cannot be downloaded here")
        assert 'No parameter named "text"' in output, output
        assert 'Type of "quant.quantize" is "(model: Module, recipe: str | Recipe | Plan' in output, output


def _checked(command: list[str]) -> str:
    result = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT)
    return result.stdout + result.stderr


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = quant.quantise


@pytest.mark.parametrize("name", sorted(old_names.ATTRIBUTES))
def test_an_old_name_says_the_new_one(name: str) -> None:
    """It still works where one name took its place, such as `quant.pack`."""
    assert name not in quant.__all__
    new = old_names.ATTRIBUTES[name]
    if re.fullmatch(r"quant(\.\w+)+", new):
        module, _, attribute = new.rpartition(".")
        with pytest.warns(FutureWarning, match=rf"^quant\.{name} is {re.escape(new)} since 0\.3$") as told:
            value = getattr(quant, name)
        assert value is getattr(importlib.import_module(module), attribute)
        assert told[0].filename == __file__
    else:
        with pytest.raises(AttributeError, match=rf"^quant\.{name} is {re.escape(new)} since 0\.3$"):
            getattr(quant, name)


@pytest.mark.parametrize("kind", sorted(old_names.KINDS))
def test_an_old_kind_of_export_says_what_takes_its_place(kind: str, tmp_path: Path) -> None:
    with pytest.raises(quant.UserError, match=rf'to="{kind}" is no kind of export any more: ') as told:
        quant.export_model(tmp_path, kind)
    assert old_names.KINDS[kind] in str(told.value)
