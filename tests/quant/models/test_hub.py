"""Names of models on the Hugging Face hub, with a cache on disk, with a hub on this machine, and without any."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from samples import BASE, GOLDENS

import quant
from quant.base.errors import UserError
from quant.cli.main import main
from quant.cli.quantize import quantize_command
from quant.models import files as hub
from quant.models.open_model import open_model

constants = pytest.importorskip("huggingface_hub.constants", reason="the extra hf")

COMPANIONS = (
    "LICENSE", "README.md", "parser.py", "tekken.json", "modules.json", "1_Pooling/config.json", "tool[1].txt",
    "2_Dense/model.safetensors", "templates/chat.jinja", "lora/adapter_config.json", "lora/adapter_model.safetensors",
)  # fmt: skip
LEFT_OUT = (
    "pytorch_model.bin", "tf_model.h5", "model.gguf", "consolidated.safetensors", "original/params.json",
    "original/consolidated.00.pth", "onnx/config.json", "onnx/model.onnx", ".gitattributes", "checkpoint-5/rng.pth",
)  # fmt: skip
COMMITS = {"main": "a" * 40, "old": "b" * 40}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of the hub, and a working directory beside it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    hub.snapshot.cache_clear()
    yield tmp_path / "cache"
    hub.snapshot.cache_clear()


def store(cache: Path, name: str, revision: str, source: Path, change: Any = None) -> Path:
    """Puts a directory into the cache as huggingface_hub does: links to blobs, named by a commit."""
    home = cache / f"models--{name.replace('/', '--')}"
    place = home / "snapshots" / COMMITS[revision]
    place.mkdir(parents=True)
    for kind in ("refs", "blobs"):
        (home / kind).mkdir(exist_ok=True)
    (home / "refs" / revision).write_text(COMMITS[revision])
    for file in source.iterdir():
        content = file.read_bytes()
        if change and file.name == "config.json":
            content = json.dumps({**json.loads(content), **change}).encode()
        blob = home / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (place / file.name).symlink_to(f"../../blobs/{blob.name}")
    return place


def test_a_model_in_the_cache_is_opened_offline(cache: Path) -> None:
    place = store(cache, "org/tiny", "main", BASE)
    source = open_model("org/tiny")
    assert source.path == place.resolve() and source.revision == COMMITS["main"] and source.name == "org/tiny"
    stored = load_file(BASE / "model.safetensors")
    assert source.model is not None
    assert all(torch.equal(stored[name], tensor) for name, tensor in source.model.state_dict().items())
    assert source.load_tokenizer().vocab_size


def test_revisions_are_told_apart(cache: Path) -> None:
    store(cache, "org/tiny", "main", BASE)
    store(cache, "org/tiny", "old", BASE, change={"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}})
    found = [open_model("org/tiny"), open_model("org/tiny", revision="old"), open_model("org/tiny@old")]
    found.append(open_model(f"org/tiny@{COMMITS['old']}"))
    assert [source.revision for source in found] == [COMMITS["main"], *[COMMITS["old"]] * 3]
    assert [source.config.rope_parameters["rope_theta"] for source in found] == [10000.0, 500.0, 500.0, 500.0]
    with pytest.raises(
        UserError, match=r"HF_HUB_OFFLINE is set.* at v2 is not whole.*hf download org/tiny --revision v2"
    ):
        open_model("org/tiny@v2")


def test_a_directory_of_that_name_wins(cache: Path) -> None:
    store(cache, "org/tiny", "main", BASE)
    shutil.copytree(BASE, Path("org/tiny"))
    assert open_model("org/tiny").revision is None
    with pytest.raises(
        UserError, match='revision="old" is for a model on the Hugging Face hub, and org/tiny is on the'
    ):
        open_model("org/tiny", revision="old")
    with pytest.raises(UserError, match="and tiny is not a name on the hub"):
        open_model("tiny", revision="old")
    with pytest.raises(UserError, match="revision main already; leave out one of them"):
        open_model("org/other@main", revision="old")


def test_commands_take_names_and_record_the_commit(cache: Path) -> None:
    store(cache, "org/tiny", "old", BASE)
    arguments = ["org/tiny@old", "--format", "nvfp4a16"]
    done = CliRunner().invoke(quantize_command, [*arguments, "--out", "made"], catch_exceptions=False)
    assert done.exit_code == 0
    provenance = json.loads(Path("made/plan.json").read_text())["provenance"]
    assert (provenance["model"], provenance["revision"]) == ("org/tiny@old", COMMITS["old"])
    ids = Path("ids.safetensors")
    from safetensors.torch import save_file

    save_file({"ids": torch.randint(0, 250, (1, 32))}, ids)
    for command in (
        ["evaluate", "org/tiny", "--revision", "old", "--text", str(ids), "--seqlen", "16", "--samples", "1"],
        ["generate", "org/tiny", "--revision", "old", "--prompt", "a", "--max-new-tokens", "2"],
        ["plan", "validate", "made/plan.json", "--model", "org/tiny", "--revision", "old"],
    ):
        assert CliRunner().invoke(main, command, catch_exceptions=False).exit_code == 0
    refused = CliRunner().invoke(main, ["plan", "validate", "made/plan.json", "--revision", "old"])
    assert refused.exit_code == 2 and "--revision old needs --model" in refused.stderr


def test_quantized_checkpoints_of_the_hub(cache: Path) -> None:
    store(cache, "org/nvfp4", "main", GOLDENS / "compressed_tensors" / "NVFP4A16")
    model, expected = quant.load("org/nvfp4"), quant.load(GOLDENS / "compressed_tensors" / "NVFP4A16")
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids).logits, expected(ids).logits)
    shown = CliRunner().invoke(main, ["inspect", "org/nvfp4", "--json"], catch_exceptions=False)
    assert len([layer for layer in json.loads(shown.stdout)["plan"]["layers"] if layer["weight"]]) == 14


# --- a hub


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download needs: who is asked for is in `asked`."""

    files: dict[str, bytes] = {}  # noqa: RUF012
    asked: list[str] = []  # noqa: RUF012

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(self.path.partition("?")[0])
        headers = {"X-Repo-Commit": COMMITS["main"]}
        if not path.startswith(("/org/tiny/", "/api/models/org/tiny")):
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        elif "/tree/" in path:
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
            ]
            self._send(200, json.dumps(listed).encode(), headers, body)
        elif path.startswith("/api/"):
            if path.endswith("/gone"):
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
            else:
                about = {"id": "org/tiny", "sha": COMMITS["main"], "siblings": [{"rfilename": n} for n in self.files]}
                self._send(200, json.dumps(about).encode(), headers, body)
        else:
            name = path.split(f"/resolve/{COMMITS['main']}/")[1]
            self.asked.append(name)
            data = self.files[name]
            self._send(200, data, {**headers, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}, body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HUGGINGFACE_CO_URL_TEMPLATE", "ENDPOINT"):
        monkeypatch.setattr(constants, name, getattr(constants, name).replace(constants.ENDPOINT, address))
    Hub.files = {file.name: file.read_bytes() for file in BASE.iterdir()}
    Hub.files |= dict.fromkeys(COMPANIONS, b"{}") | dict.fromkeys(LEFT_OUT, b"not wanted")
    Hub.files["modules.json"] = json.dumps([{"path": "1_Pooling"}, {"path": "2_Dense"}]).encode()
    Hub.asked = []
    yield Hub
    server.shutdown()
    server.server_close()


def test_a_download_takes_what_is_read_and_no_more(server: type[Hub]) -> None:
    source = open_model("org/tiny")
    assert source.revision == COMMITS["main"]
    assert set(server.asked) == {*(file.name for file in BASE.iterdir()), *COMPANIONS}
    asked = len(server.asked)
    open_model("org/tiny")
    assert len(server.asked) == asked
    with pytest.raises(UserError, match="the Hugging Face hub has no such model, or a private one"):
        open_model("org/absent")
    with pytest.raises(
        UserError, match=r"the Hugging Face hub has no revision gone of it.*--revision gone --local-dir"
    ):
        open_model("org/tiny@gone")


def test_pickles_are_fetched_where_there_are_no_safetensors(server: type[Hub]) -> None:
    del server.files["model.safetensors"]
    with pytest.raises(UserError, match="pickle"):
        open_model("org/tiny")
    assert "pytorch_model.bin" in server.asked and "tf_model.h5" not in server.asked


def test_files_beside_the_weights_go_from_the_hub_into_the_checkpoint(server: type[Hub]) -> None:
    arguments = ["org/tiny", "--format", "nvfp4a16", "--out", "made"]
    assert CliRunner().invoke(quantize_command, arguments, catch_exceptions=False).exit_code == 0
    written = {file.relative_to("made").as_posix() for file in Path("made").rglob("*") if file.is_file()}
    assert written.issuperset(COMPANIONS) and not written.intersection(LEFT_OUT)


def test_without_a_network_the_message_names_the_way_out(server: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    match = r"org/tiny: no such .*nothing is downloaded: the Hugging Face hub cannot be reached.*hf download org/tiny"
    with pytest.raises(UserError, match=match) as error:
        open_model("org/tiny")
    assert "\n" not in str(error.value) and not server.asked
