"""A quantized model of transformers saves itself as `quant.save` does, also to the hub and from a Trainer."""

import copy
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch

import quant
from quant.base.errors import UserError

transformers = pytest.importorskip("transformers", reason="the extra hf")

IDS = torch.arange(24).view(2, 12)


def files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("build", [tiny_models.llama, tiny_models.mixtral, tiny_models.bert_classifier])
def test_save_pretrained_writes_what_save_writes(build: Any, tmp_path: Path) -> None:
    done = quant.quantize(build(dtype=torch.bfloat16), "nvfp4a16")
    quant.save(done.model, done.plan, tmp_path / "saved")
    done.model.save_pretrained(tmp_path / "pretrained")
    quant.save(done.model, None, tmp_path / "own plan")
    assert files(tmp_path / "pretrained") == files(tmp_path / "saved") == files(tmp_path / "own plan")


def test_a_model_without_a_plan_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"LlamaForCausalLM carries no plan: pass the \.plan"):
        quant.save(tiny_models.llama(), None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_loaded_model_saves_the_same_bytes_again_beside_other_files(tmp_path: Path) -> None:
    done = quant.quantize(tiny_models.llama(dtype=torch.bfloat16, tie_word_embeddings=True), "fp8")
    quant.save(done.model, done.plan, tmp_path / "saved")
    out = tmp_path / "out"
    out.mkdir()
    (out / "optimizer.pt").write_text("kept")
    (out / "model-00001-of-00002.safetensors").write_text("of an earlier save")
    quant.load(tmp_path / "saved").save_pretrained(out)  # type: ignore[operator]
    assert files(out) == {**files(tmp_path / "saved"), "optimizer.pt": b"kept"}


def test_shards_are_as_small_as_asked(tmp_path: Path) -> None:
    done = quant.quantize(tiny_models.llama(dtype=torch.bfloat16), "int8")
    done.model.save_pretrained(tmp_path, max_shard_size="20KB")  # type: ignore[operator]
    shards = list(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2 and all(file.stat().st_size < 25_000 for file in shards)
    assert torch.equal(logits(quant.load(tmp_path)), logits(done.model))


@pytest.mark.parametrize("format", ["int8", "nvfp4a16", "fp8", "mxfp8"])
def test_copies_and_pickles_save_themselves(format: str, tmp_path: Path) -> None:
    done = quant.quantize(tiny_models.llama(dtype=torch.bfloat16), format, torch.arange(64).view(4, 16))
    for other in (copy.deepcopy(done.model), pickle.loads(pickle.dumps(done.model))):
        assert torch.equal(logits(other), logits(done.model))
        other.model.norm.weight.data.fill_(0.5)
        other.save_pretrained(tmp_path)
        assert torch.equal(quant.load(tmp_path).model.norm.weight, other.model.norm.weight)
    assert not torch.equal(done.model.model.norm.weight, other.model.norm.weight)


@pytest.mark.parametrize("tied", [False, True])
def test_tokens_may_be_added_to_a_quantized_model(tied: bool, tmp_path: Path) -> None:
    model = quant.quantize(tiny_models.llama(dtype=torch.bfloat16, tie_word_embeddings=tied), "nvfp4a16").model
    model.resize_token_embeddings(70)  # type: ignore[operator]
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = quant.load(tmp_path)
    ids = torch.tensor([[3, 69, 5]])
    assert loaded.config.vocab_size == 70 and torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("format", ["nvfp4", "int4a16_g32", "fp8"])
@pytest.mark.parametrize("build", [tiny_models.llama, tiny_models.mixtral])
def test_load_state_dict_takes_a_checkpoint(build: Any, format: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    done = quant.quantize(build(dtype=torch.bfloat16), format, torch.arange(64).view(4, 16))
    done.model.save_pretrained(tmp_path)
    expected = logits(done.model)
    for tensor in done.model.state_dict().values():
        tensor.copy_(torch.ones_like(tensor.float()).to(tensor.dtype))
    assert not torch.equal(logits(done.model), expected)
    missing, unexpected = done.model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not unexpected and torch.equal(logits(done.model), expected), missing


def test_what_has_no_form_on_disk_is_refused(tmp_path: Path) -> None:
    model = quant.quantize(tiny_models.llama(dtype=torch.bfloat16), "int8").model
    for options, message in (
        ({"variant": "fp8"}, "variant='fp8'.*leave it out"),
        ({"distributed_checkpoint": True}, "leave it out"),
        ({"max_shard_size": "much"}, "max_shard_size='much' is not a size"),
    ):
        with pytest.raises(UserError, match=message):
            model.save_pretrained(tmp_path / "out", **options)
    model.model.norm.to("meta")
    with pytest.raises(UserError, match=r"model\.norm\.weight: is not in memory"):
        model.save_pretrained(tmp_path / "out")


class Hub:
    """Stands in for the hub: what was pushed, by name."""

    def __init__(self) -> None:
        self.pushed: dict[str, bytes] = {}

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        self.repo_id = repo_id
        return SimpleNamespace(repo_id=repo_id)

    def create_commit(self, *, operations: Any, **options: Any) -> str:
        self.pushed |= {each.path_in_repo: Path(each.path_or_fileobj).read_bytes() for each in operations}
        return "done"

    def upload_folder(self, *, folder_path: Path, allow_patterns: list[str], **options: Any) -> None:
        self.pushed |= {name: (folder_path / name).read_bytes() for name in allow_patterns}


def test_push_to_hub_uploads_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    import transformers.utils.hub

    hub = Hub()
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda self, *a, **k: hub.create_repo(*a, **k))
    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", lambda self, **k: hub.create_commit(**k))
    monkeypatch.setattr(
        transformers.utils.hub, "create_and_tag_model_card",
        lambda *a, **k: SimpleNamespace(save=lambda path: Path(path).write_text("card")),
    )  # fmt: skip
    monkeypatch.setattr(huggingface_hub, "create_repo", hub.create_repo)
    monkeypatch.setattr(huggingface_hub, "upload_folder", hub.upload_folder)
    done = quant.quantize(tiny_models.llama(dtype=torch.bfloat16), "nvfp4a16")
    quant.save(done.model, done.plan, tmp_path / "saved")
    expected = files(tmp_path / "saved")

    done.model.push_to_hub("someone/model")
    assert hub.repo_id == "someone/model" and hub.pushed == {**expected, "README.md": b"card"}

    hub.pushed = {}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "optimizer.pt").write_text("stays here")
    done.model.save_pretrained(tmp_path / "out", push_to_hub=True)
    assert hub.repo_id == "out" and hub.pushed == expected


def train(model: Any, directory: Path, steps: int, **options: Any) -> Any:
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(64).view(8, 8) % 64]
    arguments = transformers.TrainingArguments(
        directory, max_steps=steps, save_steps=2, per_device_train_batch_size=2, learning_rate=0.01, report_to=[],
        use_cpu=True, disable_tqdm=True, logging_strategy="no", seed=1, **options,
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=rows)


def test_a_trainer_writes_checkpoints_and_goes_on_from_them(tmp_path: Path) -> None:
    """Weights of norms, the embedding and the head are trained; codes and scales stay."""
    started = tiny_models.llama(dtype=torch.float32, gain=2.0)
    make = lambda: quant.quantize(copy.deepcopy(started), "nvfp4a16").model  # noqa: E731
    whole = make()
    train(whole, tmp_path / "whole", 4).train()
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    assert json.loads((checkpoint / "config.json").read_text())["quantization_config"]["quant_method"] == (
        "compressed-tensors"
    )
    assert not torch.equal(logits(quant.load(checkpoint)), logits(make()))
    assert torch.equal(logits(quant.load(tmp_path / "whole" / "checkpoint-4")), logits(whole))
    resumed = make()
    train(resumed, tmp_path / "again", 4).train(resume_from_checkpoint=str(checkpoint))
    assert torch.equal(logits(resumed), logits(whole))
