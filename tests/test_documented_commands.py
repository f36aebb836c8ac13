"""Commands and Python lines of the documents run as they stand, on tiny models that have the names used there.

A reader copies whole blocks. So each page runs from top to bottom in a directory of its own, whose `MODEL` and
`smollm2-135m` are tiny decoders. Two things are left out: programs that are not ours (`OTHER_PROGRAMS`), and blocks
behind the comment `<!-- not run: REASON -->`.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_models
import tiny_processors
import torch
from samples import ROOT

import quant

pytest.importorskip("transformers", reason="the extra hf")

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>[^>]+) -->\n+)?^(?P<indent> *)```(?P<language>\w+)[^\n]*\n"
                   r"(?P<lines>.*?)^ *```$", re.MULTILINE | re.DOTALL)  # fmt: skip
# Programs of others in blocks that also have commands of ours: installers, servers, launchers.
OTHER_PROGRAMS = {"pip", "git", "cd", "python3", "python", "make", "vllm", "sglang", "torchrun", "."}


class Block(NamedTuple):
    """A fenced block of a page: its language, its text without the indent, and why it does not run, if so."""

    language: str
    text: str
    reason: str | None


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    for match in BLOCK.finditer(page.read_text()):
        indent = len(match["indent"])
        text = "".join(line[indent:] for line in match["lines"].splitlines(keepends=True))
        yield Block(match["language"], text, match["reason"])


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command behind a `$`, comments left out; a backslash continues a line."""
    for line in re.findall(r"^\$ (.*(?:\\\n.*)*)", text, re.MULTILINE):
        for command in line.replace("\\\n", " ").split(";") if ";" in line else [line.replace("\\\n", " ")]:
            yield shlex.split(command, comments=True)


def runs(block: Block) -> bool:
    """Whether a block has lines that this test runs."""
    ours = block.language == "python" or (
        block.language == "console" and any(words[0] not in OTHER_PROGRAMS for words in commands(block.text))
    )
    return ours and block.reason is None


RUN = [page for page in PAGES if any(runs(block) for block in blocks(page))]
# README runs with every `make test`; other pages take a minute together and run with `make docs-test`.
QUICK = {"README.md"}


def write_decoder(directory: Path) -> None:
    """A decoder of one block over bytes, in BF16 as models are released, which reads 2,048 tokens."""
    tokenizer = tiny_processors._byte_tokenizer(["<pad>", "</s>"], "$A </s>")
    tokenizer.save_pretrained(directory)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048, "num_hidden_layers": 1}
    tiny_models.llama(**sizes, hidden_size=128, intermediate_size=256, dtype=torch.bfloat16).save_pretrained(directory)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the models and files that the documents name."""
    directory = tmp_path_factory.mktemp("documented")
    write_decoder(directory / "MODEL")
    (directory / "smollm2-135m").symlink_to(directory / "MODEL")
    tiny_processors.write_whisper(directory / "WHISPER")
    tiny_processors.write_sounds(directory / "sounds")
    for name in ("text", "articles", "held_out", "own"):
        (directory / f"{name}.txt").write_text((ROOT / "benchmarks/data/evaluation.txt").read_text()[:20_000])
    (directory / "source.py").write_text(Path(__file__).read_text())
    for folder in ("benchmarks", "examples"):
        (directory / folder).symlink_to(ROOT / folder)
    return directory


def run_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Runs a command line in this process; a status other than 0 fails the test with its output."""
    from quant.cli.main import main
    from quant.cli.quantize import quantize_command

    command = {"quantize": quantize_command, "quant": main}[words[0]]
    with pytest.raises(SystemExit) as end:
        command(words[1:], prog_name=words[0])
    printed = capsys.readouterr()
    assert end.value.code == 0, f"{shlex.join(words)}\n{printed.out}{printed.err}"


def names_of_a_page() -> dict[str, Any]:
    """Names that the Python lines of pages take as defined: a model, its original, token rows, batches."""
    model, teacher = (quant.open_model("MODEL").model for _ in range(2))
    tokenizer = quant.open_model("MODEL").load_tokenizer()
    rows = quant.token_rows("text.txt", tokenizer, samples=8, seqlen=32)
    return {
        "quant": quant, "torch": torch, "model": model, "teacher": teacher, "tokenizer": tokenizer, "rows": rows,
        "batches": rows.split(4), "forward_loop": lambda model: model(rows), "ID": "MODEL", "DIR": "MODEL-nvfp4",
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # tiny models in float32 and formats of other runtimes warn; pages say so
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page.name in QUICK else pytest.mark.slow, id=page.name) for page in RUN]
)
def test_blocks_run_as_they_stand(
    page: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in models.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "100")
    for block in filter(runs, blocks(page)):
        if block.language == "python":
            monkeypatch.setattr(sys, "argv", [page.name])
            exec(compile(block.text, page.name, "exec"), names_of_a_page())
            continue
        for words in commands(block.text):
            if words[0] not in OTHER_PROGRAMS:
                run_command(words, capsys)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_of_a_shell_show_their_prompt(page: Path) -> None:
    """A block without `$` would not run, and nobody would notice."""
    for block in blocks(page):
        if block.language in ("console", "bash", "sh"):
            assert list(commands(block.text)), block.text
        if block.reason is not None:
            assert len(block.reason.split()) >= 3, "the comment says why the block does not run"
