"""The command for a missing extra is compared with what pip makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from quant.base import errors as module
from quant.base.errors import install_command

ROOT = Path(__file__).parents[3]


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The module lies where a wheel puts it, and not in a checkout."""
    monkeypatch.setattr(module, "__file__", str(tmp_path / "site-packages" / "quant" / "formats" / "x.py"))
    return monkeypatch


def test_a_checkout_is_named() -> None:
    assert install_command("hf,data") == f"pip install -e '{ROOT.resolve()}[hf,data]'"


def test_an_installed_copy_is_named_which_pip_finds_in_place(wheel: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert install_command("hf,data") == "pip install 'blockscale[hf,data]'"
    # pip's own reading of it: the installed copy fulfils the requirement, and only the extra's packages are looked for.
    folder = tmp_path / "blockscale-9.0.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: blockscale", "Version: 9.0", "Provides-Extra: hf"]
    (folder / "METADATA").write_text("\n".join([*lines, 'Requires-Dist: not-there-at-all; extra == "hf"', ""]))
    command = ["-m", "pip", "--disable-pip-version-check", "install", "--no-index", "blockscale[hf]"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
    assert f"Requirement already satisfied: blockscale[hf] in {tmp_path}" in result.stdout
    assert "No matching distribution found for not-there-at-all" in result.stderr


def test_a_copy_that_is_not_installed_needs_a_checkout(wheel: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    wheel.setattr(metadata, "distribution", absent)
    assert install_command("hf") == "pip install '.[hf]' in a checkout of Blockscale"
