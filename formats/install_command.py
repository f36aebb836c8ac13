"""`install_command` gives the command that installs an extra of this distribution, for messages about packages.

No package index has the distribution yet, so extras are installed from the checkout that this copy came from.
"""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

_DISTRIBUTION = "blockscale"


def install_command(extra: str) -> str:
    """Returns the command that adds an extra of `pyproject.toml` to this installation.

    Args:
        extra: `hf`, or several: `hf,data`.

    Returns:
        `pip install -e '/home/me/blockscale[hf]'` for a copy that is imported from a checkout, and without `-e` for one
        that pip copied from a directory which is still there. For a wheel from elsewhere, `pip install '.[hf]'` and
        where to run it.
    """
    checkout = Path(__file__).resolve().parent.parent
    if _is_ours(checkout):
        return f"pip install -e {shlex.quote(f'{checkout}[{extra}]')}"
    directory = _source_directory()
    if directory is not None and _is_ours(directory):
        return f"pip install {shlex.quote(f'{directory}[{extra}]')}"
    return f"pip install '.[{extra}]' in a checkout of Blockscale"


def _is_ours(directory: Path) -> bool:
    project = directory / "pyproject.toml"
    return project.is_file() and f'name = "{_DISTRIBUTION}"' in project.read_text(encoding="utf-8")


def _source_directory() -> Path | None:
    """Returns the directory that pip installed this copy from, as it notes in `direct_url.json` (PEP 610)."""
    try:
        direct_url_json = metadata.distribution(_DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    url = urlsplit(json.loads(direct_url_json)["url"]) if direct_url_json else None
    return Path(url2pathname(url.path)) if url is not None and url.scheme == "file" else None
