"""Models with Python files of their own (`auto_map`) are quantized, written and read, by the command and in Python."""

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import quant
from quant.base.errors import UserError
from quant.cli.main import main
from quant.report.report import read_run
from quant.report.summary import next_steps

transformers = pytest.importorskip("transformers", reason="the extra hf")
pytest.importorskip("compressed_tensors", reason="the extra test")

CONFIGURATION = """
from transformers import PretrainedConfig
class OwnConfig(PretrainedConfig):
    model_type = "own_lm"
    def __init__(self, vocab_size=128, hidden_size=64, **others):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        super().__init__(**others)
"""
PARTS = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.proj = nn.Linear(width, width)
    def forward(self, x):
        return x + torch.tanh(self.proj(x))
"""
# The model imports a file that imports another, and no reference of the config names either.
PACKAGE = "from .parts_own import Block as OwnBlock\n"
MODELING = """
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from .configuration_own import OwnConfig
from .blocks_own import OwnBlock
class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.emb = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([OwnBlock(config.hidden_size) for _ in range(2)])
        self.post_init()
    def forward(self, input_ids=None, **others):
        x = self.emb(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x
class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
    def forward(self, input_ids=None, **others):
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids)))
    def get_input_embeddings(self):
        return self.model.emb
"""
FILES = {
    "configuration_own.py": CONFIGURATION, "modeling_own.py": MODELING, "blocks_own.py": PACKAGE, "parts_own.py": PARTS,
}  # fmt: skip
AUTO_MAP = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModel": "modeling_own.OwnModel",
    "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
}
IDS = torch.arange(3, 67).view(4, 16)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    source = tmp_path / "own"
    source.mkdir()
    for name, code in FILES.items():
        (source / name).write_text(code)
    config = {"model_type": "own_lm", "architectures": ["OwnForCausalLM"], "dtype": "bfloat16", "auto_map": AUTO_MAP}
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    torch.manual_seed(0)
    weights = {f"model.layers.{i}.proj.weight": torch.randn(64, 64) / 8 for i in range(2)}
    weights |= {f"model.layers.{i}.proj.bias": torch.randn(64) / 8 for i in range(2)}
    weights |= {"model.emb.weight": torch.randn(128, 64), "lm_head.weight": torch.randn(128, 64) / 8}
    save_file({name: w.bfloat16() for name, w in weights.items()}, source / "model.safetensors", {"format": "pt"})
    return source


def written_is_right(out: Path, source: Path) -> None:
    """transformers and `quant.load` read the checkpoint to the same logits, near those of the source."""
    assert {name: (out / name).read_text() for name in FILES} == FILES
    auto = transformers.AutoModelForCausalLM
    original = auto.from_pretrained(source, trust_remote_code=True).eval()
    theirs = auto.from_pretrained(out, trust_remote_code=True).eval()
    ours = quant.load(out, trust_remote_code=True)
    with torch.no_grad():
        expected, by_them, by_us = (model(IDS).logits.float() for model in (original, theirs, ours))
    torch.testing.assert_close(by_us, by_them, rtol=0.02, atol=0.02)
    error = (by_us - expected).norm() / expected.norm()
    assert 0.001 < error < 0.3  # NVFP4 loses about a tenth
    with pytest.raises(UserError, match=r"pass trust_remote_code=True$"):
        quant.load(out)
    card = (out / "README.md").read_text()
    assert card.count("$ vllm serve DIR") == card.count("$ vllm serve DIR --trust-remote-code\n")
    assert "$ quant check DIR --trust-remote-code\n" in card and 'quant.load("DIR", trust_remote_code=True)' in card
    verified = quant.verify(out, trust_remote_code=True)
    assert not verified.findings and "forward pass" in verified.checked


def run(*arguments: object) -> None:
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == 0, result.output


def test_the_command_works_to_the_end(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(
        "quantize", directory, "--format", "nvfp4a16", "--effort", 0, "--device", "cpu", "--out", out,
        "--trust-remote-code",
    )  # fmt: skip
    written_is_right(out, directory)
    shown = re.findall(r"(?:quant generate|quant check|vllm serve) \.[^<]*", (out / "report.html").read_text())
    assert all("--trust-remote-code" in command for command in shown)
    (out / "tokenizer_config.json").write_text("{}")  # the commands below need one to run
    lines = [line for line in next_steps(*read_run(out), out) if re.match("try it|measure|serve", line)]
    assert len(lines) >= 2 and all(line.endswith("--trust-remote-code") for line in lines)
    (out / "tokenizer_config.json").unlink()
    run("check", out, "--trust-remote-code")
    run("export", out, "--to", "modelopt", "--out", tmp_path / "modelopt", "--trust-remote-code")
    quant.convert(out, tmp_path / "converted", "modelopt", trust_remote_code=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "converted").iterdir()} == {
        file.name: file.read_bytes() for file in (tmp_path / "modelopt").iterdir()
    }
    again = quant.load(tmp_path / "modelopt", trust_remote_code=True)
    assert torch.equal(again(IDS).logits, quant.load(out, trust_remote_code=True)(IDS).logits)


def test_a_model_of_transformers_auto_class_is_saved(directory: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    done = quant.quantize(model, "nvfp4a16", IDS, effort=0)
    quant.save(done.model, done.plan, tmp_path / "saved")
    written_is_right(tmp_path / "saved", directory)
    done.model.save_pretrained(tmp_path / "pretrained")
    written_is_right(tmp_path / "pretrained", directory)


def test_python_opens_it_on_request(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="trust_remote_code=True"):
        quant.open_model(directory)
    source = quant.open_model(directory, trust_remote_code=True)
    assert type(source.model).__name__ == "OwnForCausalLM"  # and not the bare model, without its head
    with pytest.raises(UserError, match="trust_remote_code=True"):  # the trust ended with the call
        quant.open_model(directory)
    done = quant.quantize(source.model, "nvfp4a16", IDS, effort=0)
    quant.save(done.model, done.plan, tmp_path / "out")
    written_is_right(tmp_path / "out", directory)


def test_without_architectures_it_is_the_causal_language_model(directory: Path) -> None:
    fields = json.loads((directory / "config.json").read_text())
    del fields["architectures"]
    (directory / "config.json").write_text(json.dumps(fields))
    model = quant.open_model(directory, trust_remote_code=True).model
    assert type(model).__name__ == "OwnForCausalLM"
