"""README.md from top to bottom, pasted block by block as a new user would, in a copy of the repository.

    PYTHONPATH=. python tests/readme_blocks.py                on a tiny model, in an environment linked to this one
    PYTHONPATH=. python tests/readme_blocks.py --fresh        the same in a new environment, filled by README's lines
    PYTHONPATH=. python tests/readme_blocks.py --fresh --model smollm2-135m   on the model of the demo: 20 minutes

The only edit is the name of the model in the place of `MODEL`. Every block ends with exit code 0, and prints the lines
that stand below its commands. Not run are blocks behind `<!-- not run: REASON -->`, and commands whose comment begins
with `needs`. `make docs-test` runs the first line; a release the others (CONTRIBUTING.md, *Releases*).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from test_documented_commands import Block, blocks, write_decoder

ROOT = Path(__file__).resolve().parents[1]
TINY = "tiny"
# A pip that builds the copy with the setuptools at hand asks no index, so a linked environment works without one.
LINKED = {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def copy_of_repository(directory: Path) -> None:
    """Copies the files that git tracks, links as links, as they are in the working tree."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).exists():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name, follow_symlinks=False)


def environment(directory: Path, fresh: bool) -> dict[str, str]:
    """Makes an environment, which sees the packages of this one unless it is `fresh`; returns the shell's variables."""
    venv.create(directory, with_pip=True)
    if not fresh:
        (packages,) = directory.glob("lib/python*/site-packages")
        # A plain path, so that the editable installation of this environment is not followed.
        paths = [path for path in sys.path if path.endswith("-packages")]
        (packages / "linked.pth").write_text("\n".join(paths))
        # Python 3.11 puts a setuptools into each environment that is too old to build the package.
        subprocess.run([directory / "bin" / "pip", "uninstall", "--yes", "--quiet", "setuptools"], check=True)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {
        **inherited, **({} if fresh else LINKED), "COLUMNS": "80", "CUDA_VISIBLE_DEVICES": "",
        "PATH": f"{directory / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip


def script_of(block: Block, model: str, torch: str | None) -> str:
    """Returns a block as it is pasted, without the commands that need something, and with the name of the model."""
    text = re.sub(r"\bMODEL\b", model, block.text)
    if model == TINY and block.language == "python":
        text = text.replace("smollm2-135m", TINY)
    if block.language == "python":
        return text
    commands = re.findall(r"^\$ (.*(?:\\\n.*)*)", text, re.MULTILINE)
    if torch is not None:
        commands = [torch if command.startswith("pip install torch ") else command for command in commands]
    return "\n".join(["set -e", *(command for command in commands if not re.search(r"# needs ", command))])


def main() -> int:
    """Runs the blocks; returns the number of those that failed."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", default=TINY)
    options.add_argument("--fresh", action="store_true", help="an environment of its own, which pip fills")
    options.add_argument("--torch", help="what to run in the place of README's `pip install torch …`")
    options.add_argument("--first", type=int, default=1, help="number of the first block to run, in --directory")
    options.add_argument("--directory", type=Path, help="keep the copy here")
    parsed = options.parse_args()
    torch = parsed.torch if parsed.torch or parsed.fresh else "true"
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        directory = parsed.directory or Path(temporary) / "blockscale"
        if parsed.first == 1:
            copy_of_repository(directory)
            write_decoder(directory / TINY)
        variables = environment(directory / ".venv", parsed.fresh)
        for number, block in enumerate(blocks(directory / "README.md"), 1):
            if block.reason is not None or number < parsed.first:
                print(f"block {number}: not run: {block.reason or 'before --first'}", flush=True)
                continue
            program = ["python", "-"] if block.language == "python" else ["bash"]
            started = time.monotonic()
            ended = subprocess.run(
                program, input=script_of(block, parsed.model, torch), cwd=directory, env=variables, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            shown = [line for line in block.text.splitlines() if line and not line.startswith(("$", " "))]
            missing = [line for line in shown if block.language == "console" and line not in ended.stdout]
            verdict = f"exit code {ended.returncode}" + "".join(f"; lacks {line!r}" for line in missing)
            print(f"block {number}: {verdict}, {time.monotonic() - started:.0f} s", flush=True)
            if ended.returncode or missing:
                failed += 1
                print("\n".join(ended.stdout.splitlines()[-40:]), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
