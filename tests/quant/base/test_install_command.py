"""The command for a missing extra is compared with what pip notes, and with the directory that pip would read."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from quant.base import errors as module
from quant.base.errors import install_command

ROOT = Path(__file__).parents[3]


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The module lies where a wheel puts it, and not in a checkout."""
    monkeypatch.setattr(module, "__file__", str(tmp_path / "site-packages" / "quant" / "formats" / "x.py"))
    return monkeypatch


def note(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))


def test_a_checkout_is_named() -> None:
    assert install_command("hf,data") == f"pip install -e '{ROOT.resolve()}[hf,data]'"


def test_the_directory_that_pip_installed_from_is_named(wheel: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "with space"
    source.mkdir()
    note(wheel, json.dumps({"url": source.as_uri(), "dir_info": {}}))
    assert install_command("hf") == "pip install '.[hf]' in a checkout of Blockscale"  # it is gone
    (source / "pyproject.toml").write_text('[project]\nname = "another"\n')
    assert install_command("hf") == "pip install '.[hf]' in a checkout of Blockscale"
    (source / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert install_command("hf") == f"pip install '{source}[hf]'"


@pytest.mark.parametrize("text", [None, '{"url": "https://example.org/blockscale-1.whl", "archive_info": {}}'])
def test_a_wheel_from_elsewhere_needs_a_checkout(wheel: pytest.MonkeyPatch, text: str | None) -> None:
    note(wheel, text)
    assert install_command("hf") == "pip install '.[hf]' in a checkout of Blockscale"


def test_a_copy_that_is_not_installed_needs_a_checkout(wheel: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    wheel.setattr(metadata, "distribution", absent)
    assert install_command("hf") == "pip install '.[hf]' in a checkout of Blockscale"
