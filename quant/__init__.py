"""Blockscale: from a trained PyTorch model to a deployed low-precision one.

The public names are resolved when first used, so that `import quant` costs nothing and pulls in neither torch nor
transformers. Editors and type checkers read the same list of them, `__init__.pyi`.
"""

import importlib
import os
import re
from typing import Any

__version__ = "0.3.0"


def _check_links() -> None:
    """Raises ImportError in a checkout where git or an archive has written text files in the place of the links."""
    home = os.path.dirname(__file__)
    links = [os.path.join(home, room) for room in ("formats", "kernels", "recipes", "calibration", "export")]
    if os.path.isdir(home) and (broken := [path for path in links if not os.path.isdir(path)]):
        paths = " ".join(f"quant/{os.path.basename(path)}" for path in links)
        raise ImportError(
            f"{broken[0]} is not the link to ../{os.path.basename(broken[0])} that it is in the repository: in a "
            f"clone, run `git config core.symlinks true` and `git checkout -- {paths}` (Windows makes links only in "
            "its developer mode); otherwise install Blockscale with `pip install .`, which needs no links"
        )


_check_links()

with open(os.path.join(os.path.dirname(__file__), "__init__.pyi"), encoding="utf-8") as _stub:
    _HOME = {name: module for module, name in re.findall(r"^from (\S+) import (\w+)", _stub.read(), re.MULTILINE)}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from quant.base.old_names import attribute

        return attribute(name)
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # found there from now on
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
