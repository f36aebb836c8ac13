"""Slips of a person at a terminal: each is refused by a line that is true, and what the line says to do works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from samples import ROOT, write_short_base

import quant
from quant.cli.main import main
from quant.models.open_model import open_model

pytest.importorskip("transformers", reason="the extra hf")

DATA = "--samples 2 --seqlen 16"
ROWS = torch.arange(3, 131).reshape(4, 32) % 60


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = tmp_path_factory.mktemp("slips")
    write_short_base(case / "model")
    (case / "text.txt").write_text(" ".join(map(str, range(64))))
    records = [{"text": None if i % 2 else f"{i} {i + 1} {i + 2} {i + 3}"} for i in range(40)]
    (case / "cells.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (case / "lists.jsonl").write_text("[3, 4, 5]\n" * 9)
    (case / "ids.npy").write_bytes(b"\x93NUMPY\x01\x00")
    (case / "other.pt").write_text("hello")
    torch.save(torch.rand(4, 32), case / "floats.pt")
    torch.save(ROWS, case / "ids.pt")
    os.mkfifo(case / "pipe") if hasattr(os, "mkfifo") else (case / "pipe").touch()
    ran("quantize {case}/model --format fp8_channel --effort 0 --out {case}/runs/stored", case)
    return case


def invoke(command: str, case: Path) -> tuple[int, str]:
    result = CliRunner().invoke(main, [word.format(case=case) for word in command.split()])
    return result.exit_code, result.output


def ran(command: str, case: Path) -> str:
    code, output = invoke(command, case)
    assert code == 0, output
    return output


EVALUATE = "evaluate {case}/runs/stored --text {case}/"
# A command without its end, an end that is refused, the words of the refusal, and an end that they lead to.
SLIPS = {
    "a device of data": (EVALUATE, f"pipe {DATA}", "pipe: a pipe or a device, and data is read more than once; write "
        "it to a file\n", f"text.txt {DATA}"),
    "a model for data": (EVALUATE, f"model {DATA}", "model: the directory of a model, where a text or other data "
        "belongs\n", f"text.txt {DATA}"),
    "lists in lines": (EVALUATE, f"lists.jsonl {DATA}", "lists.jsonl, line 2: more follows a first value; give one "
        "object in each line, or one list of objects\n", f"cells.jsonl {DATA}"),
    "numbers of numpy": (EVALUATE, f"ids.npy {DATA}", "save it as UTF-8, or token ids as .safetensors or .pt\n",
        f"ids.pt {DATA}"),
    "no file of torch": (EVALUATE, f"other.pt {DATA}", "other.pt: torch.load cannot read it as tensors (no file of "
        "torch.save); write it by torch.save\n", f"ids.pt {DATA}"),
    "ids that are no integers": (EVALUATE, f"floats.pt {DATA}", "floats.pt: input_ids is torch.float32; token ids are "
        "integers: save them as int64\n", f"ids.pt {DATA}"),
    "rows that predict nothing": (EVALUATE, "text.txt --samples 2 --seqlen 1", "1 is not in the range x>=2.\n",
        "text.txt --samples 2 --seqlen 2"),
    "a folder of checkpoints": ("inspect {case}/", "runs", "runs: not a checkpoint but a folder with some; give one of "
        "them: {case}/runs/stored\n", "runs/stored"),
    "a file of a run": ("report {case}/runs/", "stored/plan.json", "stored/plan.json: no report.json; it is a file; "
        "pass its directory, {case}/runs/stored\n", "stored"),
    "a folder for a page": ("report {case}/runs/stored --out {case}/", "runs", "runs is a directory; name a file with "
        "--out\n", "page.html"),
}  # fmt: skip


@pytest.mark.parametrize("name", SLIPS)
def test_the_way_out_of_a_slip_works(name: str, case: Path) -> None:
    command, wrong, says, right = SLIPS[name]
    if name == "a device of data" and not hasattr(os, "mkfifo"):
        pytest.skip("needs mkfifo")
    code, output = invoke(command + wrong, case)
    assert code == 2 and says.format(case=case) in output, output
    ran(command + right, case)


def test_standard_input_is_not_read(case: Path) -> None:
    code, output = invoke(EVALUATE.replace("{case}/", "").replace("runs", "{case}/runs") + "-", case)
    assert code == 2 and output == "error: --text -: standard input is not read; write it to a file\n"


@pytest.mark.parametrize(("command", "named"), [("quantize m --format fp8 --out x --calib", "--calib"),
                                                ("evaluate m --text", "--text")])  # fmt: skip
def test_an_empty_value_of_a_repeatable_option(command: str, named: str) -> None:
    result = CliRunner().invoke(main, [*command.split(), ""])
    assert result.exit_code == 2 and f"'{named}' is empty, as a variable that is not set" in result.output


def test_an_empty_cell_of_the_first_record(case: Path) -> None:
    """The first record decides nothing: its column is empty, and the others have text."""
    lines = (case / "cells.jsonl").read_text().splitlines(keepends=True)
    (case / "turned.jsonl").write_text("".join(lines[1:]))
    (case / "full.jsonl").write_text("".join(lines[2::2]))
    turned, full = (ran(f"{EVALUATE}{name}.jsonl {DATA} --json", case) for name in ("turned", "full"))
    losses = [json.loads(output[output.index("{") :])["perplexity"] for output in (turned, full)]
    assert losses[0] == losses[1]


@pytest.mark.skipif(sys.platform == "win32", reason="arguments of Windows are no bytes")
def test_a_prompt_in_another_locale_and_one_of_other_bytes(case: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "quant", "generate", str(case / "model"), "--max-new-tokens", "2", "--json"]
    said = subprocess.run([*command, "--prompt", "é 5"], env=environment, capture_output=True, check=False)
    assert said.returncode == 0 and json.loads(said.stdout)["prompt"] == "é 5", said.stderr
    said = subprocess.run([*command, "--prompt", b"\xff"], env=environment, capture_output=True, check=False)
    assert said.returncode == 2
    assert said.stderr == b"error: --prompt '\\udcff': not UTF-8 (invalid start byte); write it in UTF-8\n"


def test_a_page_beside_a_checkpoint_that_is_only_read(
    case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write anywhere, so the system's answer is replaced.
    monkeypatch.setattr(os, "access", lambda path, mode, **options: mode != os.W_OK)
    code, output = invoke("report {case}/runs/stored", case)
    assert code == 2 and output.endswith("runs/stored cannot be written to; name another place with --out\n")
    ran(f"report {{case}}/runs/stored --out {tmp_path}/page.html", case)
    assert "fp8_channel" in (tmp_path / "page.html").read_text(encoding="utf-8")


def shards(base: Path, *, indexed: bool, factor: float | None) -> None:
    """Divides the weights into two files; the second has a tensor of the first too, times `factor`."""
    tensors = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    names, index = sorted(tensors), {}
    for part, own in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{part}-of-00002.safetensors"
        held = {name: tensors[name] for name in own}
        if part == 2 and factor is not None:
            held[names[0]] = tensors[names[0]] * factor
        save_file(held, base / file, {"format": "pt"})
        index |= dict.fromkeys(own, file)
    if indexed:
        (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def change(field: str, value: object) -> Callable[[Path], None]:
    def changed(base: Path) -> None:
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps({**config, field: value}))

    return changed


def point(base: Path) -> None:
    (base / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")


def dangle(base: Path) -> None:
    (base / "model.safetensors").unlink()
    (base / "model.safetensors").symlink_to(base / "blobs" / "0")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda base: shards(base, indexed=False, factor=None), "has a config.json and model-00001-of-00002.safetensors"
         ", model-00002-of-00002.safetensors; expected model.safetensors or pytorch_model.bin, or an index of shards, "
         "model.safetensors.index.json; download it"),
        (change("dtype", "int8"), "config.json: dtype 'int8' is no floating-point dtype; write one there, such as "
         "bfloat16"),
        (change("torch_dtype", "banana"), "config.json: torch_dtype 'banana' is no floating-point dtype; write one "
         "there, such as bfloat16"),
        (change("quantization_config", [1]), "config.json: quantization_config is a list, not a table; download it "
         "again"),
        (point, "model.safetensors: a pointer of Git LFS; `git lfs pull` in "),
        pytest.param(dangle, "model.safetensors: this weight file is missing or empty; download it again",
                     marks=pytest.mark.skipif(sys.platform == "win32", reason="links take a privilege there")),
    ],
)  # fmt: skip
def test_a_directory_that_is_not_whole(damage: Callable[[Path], None], says: str, case: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(case / "model", base)
    damage(base)
    with pytest.raises(quant.UserError) as error:
        open_model(str(base))
    assert says in str(error.value)


@pytest.mark.parametrize("with_data", [True, False])
def test_a_tokenizer_that_is_damaged_is_told(with_data: bool, case: Path, tmp_path: Path) -> None:
    shutil.copytree(case / "model", tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{")
    data = f"--calib {case}/ids.pt --calib-samples 2 --seqlen 16" if with_data else ""
    told = ran(f"quantize {tmp_path}/base --format int8 --effort 0 --out {tmp_path}/out {data}", case)
    assert "out/tokenizer.json: not valid JSON: " in told and "try it:" not in told, told


def test_a_disk_without_room_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    from quant.cli.command import _as_line

    error = FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")
    said = "No usable temporary directory found in ['/tmp']; make room there, or name another by TMPDIR"
    assert _as_line(error) == (said, 2)


@pytest.mark.slow
def test_a_graph_of_one_size_of_sequence(tmp_path: Path) -> None:
    """Experts of Aria are counted from the first input's tokens."""
    pytest.importorskip("onnxscript", reason="the extra onnx")
    sizes = {**tiny_models.DECODER, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}
    model = tiny_models.build("AriaText", "ForCausalLM", sizes).eval()
    result = quant.quantize(model, "int8@16bit", ROWS[:, :16], effort=0)
    with pytest.warns(UserWarning, match="need quant.load or a server"):
        quant.save(result.model, result.plan, tmp_path / "stored")
    export = f"export {tmp_path}/stored --to onnx --out {tmp_path}/onnx"
    code, output = invoke(export, tmp_path)
    fixed = "--capacity 0 and --input input_ids:int64:1,16"
    assert code == 2 and output.endswith(f"or fix the sizes of its input, as {fixed} does\n"), output
    ran(f"{export} {fixed.replace('and ', '')}", tmp_path)
