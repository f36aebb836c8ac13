"""onnxruntime-genai loads the exported directory and writes the tokens that the model writes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving_samples
import tiny_processors
import torch
from click.testing import CliRunner
from samples import ROOT, write_short_base

import quant
from quant.cli.main import main
from quant.cli.quantize import quantize_command

pytest.importorskip("onnxscript", reason="needs the extra onnx")
pytest.importorskip("transformers", reason="needs the extra hf")
genai = pytest.importorskip("onnxruntime_genai", reason="needs the extra genai")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra genai")

from quant.export.onnx.export_onnx import write_onnx  # noqa: E402 -- needs onnx
from quant.export.onnx.genai import genai_config, other_genai_files  # noqa: E402 -- as above

ROWS = torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(0))
NEW = serving_samples.NEW


def written(folder: Path, rows: list[list[int]]) -> list[list[int]]:
    """The tokens that the library adds to rows as one batch; it takes short rows padded on their right."""
    pad = json.loads((folder / "genai_config.json").read_text())["model"]["pad_token_id"]
    longest = max(map(len, rows))
    padded = np.array([row + [pad] * (longest - len(row)) for row in rows], np.int32)
    model = genai.Model(str(folder))
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=longest + NEW, do_sample=False, batch_size=len(rows))
    generator = genai.Generator(model, parameters)
    generator.append_tokens(padded if len(rows) > 1 else padded[0])
    while not generator.is_done():
        generator.generate_next_token()
    return [generator.get_sequence(index)[longest:].tolist() for index in range(len(rows))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "format"),
    [("llama-64", "fp8"), ("llama-128", "int4a16"), ("gemma3", "int4a16"), ("mistral", "int4a16"), ("qwen3", "fp8")],
)
def test_greedy_tokens(kind: str, format: str, tmp_path: Path) -> None:
    """Rows alone, and together: there, padding stands between a short row's prompt and its new tokens."""
    model = serving_samples.decoder(kind)
    plan = quant.quantize(model, format, ROWS, solver="rtn").plan
    write_onnx(model, tmp_path / "model.onnx", genai=True, plan=plan)
    rows = [row[:100] for row in serving_samples.prompts()]  # 5, 100 and 100 tokens
    expected = serving_samples.greedy_tokens(model, rows)
    # No row may end early: the end token is one that nobody writes. A prompt may not end with the padding token.
    unused = sorted(set(range(64)) - {token for row in expected for token in row})
    model.generation_config.eos_token_id = unused[0]
    model.generation_config.pad_token_id = next(token for token in unused if token not in [row[-1] for row in rows])
    (tmp_path / "genai_config.json").write_text(json.dumps(genai_config(model)))
    for row, tokens in zip(rows, expected, strict=True):
        assert written(tmp_path, [row]) == [tokens]
    assert written(tmp_path, rows) == expected


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("genai")
    out, base = folder / "checkpoint", write_short_base(folder / "base")
    tiny_processors._byte_tokenizer(["<pad>", "</s>"], "$A").save_pretrained(base)
    arguments = [str(base), "--format", "fp8_channel", "--effort", "0", "--out", str(out), "--quiet"]
    assert CliRunner().invoke(quantize_command, arguments).exit_code == 0
    return out


def export(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["export", *map(str, arguments)])


@pytest.fixture(scope="module")
def out(checkpoint: Path) -> Path:
    """The directory that the library loads."""
    out = checkpoint.with_name("out")
    result = export(checkpoint, "--to", "onnx", "--genai", "--dtype", "fp32", "--out", out)
    assert result.exit_code == 0, result.output
    return out


def test_the_directory_has_all_that_the_library_needs(checkpoint: Path, out: Path) -> None:
    assert {"genai_config.json", "model.onnx", "tokenizer.json", "tokenizer_config.json"} <= {
        file.name for file in out.iterdir()
    }
    model = quant.load(checkpoint).to(torch.float32)
    row = [3, 1, 4, 1, 5]
    (expected,) = serving_samples.greedy_tokens(model, [row])
    (tokens,) = written(out, [row])
    ends = {model.generation_config.eos_token_id}
    assert len(tokens) > 4 and tokens == expected[: len(tokens)] and (len(tokens) == NEW or tokens[-1] in ends)
    # Rows of different lengths together.
    rows = [row, [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    for tokens, expected in zip(written(out, rows), serving_samples.greedy_tokens(model, rows), strict=True):
        end = next((i for i, token in enumerate(expected) if token in ends), NEW)
        assert tokens[:end] == expected[:end]


def test_files_beside_the_graph_are_compared(checkpoint: Path, out: Path, tmp_path: Path) -> None:
    """The graph is right in each case. Sampling and providers are the user's."""
    model, config = quant.load(checkpoint), out / "genai_config.json"
    assert other_genai_files(model, checkpoint, out) == []
    shutil.copytree(out, tmp_path / "other")
    document = json.loads(config.read_text())
    document["search"]["top_k"] = 5
    document["model"]["decoder"]["session_options"]["provider_options"] = [{"cuda": {}}]
    (tmp_path / "other" / config.name).write_text(json.dumps(document))
    assert other_genai_files(model, checkpoint, tmp_path / "other") == []
    document["model"]["eos_token_id"] = [7]
    (tmp_path / "other" / config.name).write_text(json.dumps(document))
    (tmp_path / "other" / "tokenizer.json").write_text((out / "tokenizer.json").read_text().replace('"a"', '"ä"', 1))
    (tmp_path / "other" / "tokenizer_config.json").unlink()
    others = ["tokenizer.json", "tokenizer_config.json", config.name]
    assert other_genai_files(model, checkpoint, tmp_path / "other") == others
    result = CliRunner().invoke(main, ["check", str(tmp_path / "other"), "--source", str(checkpoint)])
    assert result.exit_code == 2 and all(name in result.stdout for name in others), result.output
    (tmp_path / "other" / "added_tokens.json").write_text("{}")  # a file that the library's tokenizer reads too
    (tmp_path / "other" / config.name).unlink()
    others = ["added_tokens.json", *others]
    assert other_genai_files(model, checkpoint, tmp_path / "other") == others
    result = CliRunner().invoke(main, ["check", str(tmp_path / "other"), "--source", str(checkpoint), "--json"])
    found = {row["name"]: row["found"] for row in json.loads(result.stdout)["audit"]}
    assert result.exit_code == 2 and found[config.name] == found["tokenizer_config.json"] == "not in the directory"
    assert found["added_tokens.json"] == found["tokenizer.json"] == "another file"
    (tmp_path / "other" / config.name).write_text("[]")
    with pytest.raises(ValueError, match=r"genai_config\.json: not a configuration: it: expected an object"):
        other_genai_files(model, checkpoint, tmp_path / "other")


def test_text_in_c(out: Path, tmp_path: Path) -> None:
    """The program of examples/cpp writes the text that Python writes with the same library."""
    compiler = shutil.which("c++") or shutil.which("g++")
    library = Path(genai.__file__).parent / "libonnxruntime-genai.so"
    if compiler is None or not library.is_file():
        pytest.skip("needs a C++ compiler and the library of Linux")
    program, prompt, new = tmp_path / "generate_text", "What is this? A sentence.", 12
    source = ROOT / "examples" / "cpp" / "generate_text.cpp"
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", str(source), str(library), "-o", str(program)]
    made = subprocess.run([*command, f"-Wl,-rpath,{library.parent}"], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    model = genai.Model(str(out))
    tokenizer, parameters = genai.Tokenizer(model), genai.GeneratorParams(model)
    ids = tokenizer.encode(prompt)
    # Drawn, because this model likes one letter best, and then the end.
    sampling = {"temperature": 2, "random_seed": 5, "min_length": len(ids) + new}
    parameters.set_search_options(max_length=len(ids) + new, do_sample=True, **sampling)
    generator, stream, text = genai.Generator(model, parameters), tokenizer.create_stream(), ""
    generator.append_tokens(ids)
    while not generator.is_done():
        generator.generate_next_token()
        text += stream.decode(generator.get_next_tokens()[0])
    command = [str(program), str(out), str(new), prompt, "do_sample=1"]
    library = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so*"))

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "ORT_LIB_PATH": str(library)}
        return subprocess.run([*command, *options], capture_output=True, text=True, check=False, env=environment)

    done, refused = run(*(f"{name}={value}" for name, value in sampling.items())), run("temperature")
    assert (done.returncode, done.stdout) == (0, f"{text}\n") and len(set(text)) > 4, done.stderr
    assert refused.returncode == 1 and "temperature: expected NAME=NUMBER" in refused.stderr


def test_refusals(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both come before the model is exported."""
    monkeypatch.setattr("quant.export.export_model.write_onnx", lambda *_, **__: pytest.fail("it was exported"))
    out = tmp_path / "out"
    result = export(checkpoint, "--to", "onnx", "--genai", "--capacity", 64, "--out", out)
    assert result.exit_code == 2 and "leave --capacity out" in result.stderr
    (checkpoint / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    try:
        result = export(checkpoint, "--to", "onnx", "--genai", "--out", out)
    finally:
        (tmp_path / "tokenizer.json").rename(checkpoint / "tokenizer.json")
    assert result.exit_code == 2 and "onnxruntime-genai needs tokenizer.json, which is not there" in result.stderr
    assert not out.exists()
