"""The parts of transformers that names on disk follow from are there, and a version without them is an error."""

import importlib
import re
from pathlib import Path

import pytest
from tiny_models import mixtral

from quant.export.checkpoint.files import names
from quant.export.checkpoint.files.names import class_rules, file_rules, is_renaming, operations, renaming

transformers = pytest.importorskip("transformers", reason="the extra hf")
conversion_mapping = importlib.import_module("transformers.conversion_mapping")
core_model_loading = importlib.import_module("transformers.core_model_loading")
quantizers_base = importlib.import_module("transformers.quantizers.base")


def test_a_loaded_model_has_the_rules_that_its_files_needed(tmp_path: Path) -> None:
    """As transformers' own `save_pretrained` needs them; without, the rules of its class would be taken for its own."""
    model = mixtral()
    model.save_pretrained(tmp_path / "released")
    model.save_pretrained(tmp_path / "as_in_the_model", save_original_format=False)
    used = {
        name: file_rules(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name))
        for name in ("released", "as_in_the_model")
    }
    assert not used["as_in_the_model"] and class_rules(model)
    on_disk = "model.layers.0.block_sparse_moe.gate.weight"
    names = [renaming(rule)(on_disk) for rule in used["released"] if is_renaming(rule)]
    assert "model.layers.0.mlp.gate.weight" in names
    assert ["MergeModulelist", "Concatenate"] in [operations(rule) for rule in used["released"]]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (conversion_mapping, "get_model_conversion_mapping"),
        (core_model_loading.WeightTransform, "rename_source_key"),
        (core_model_loading.WeightConverter, "convert"),
    ],
)
def test_a_version_that_keeps_its_rules_in_another_way(
    owner: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mixtral()
    class_rules(model)
    monkeypatch.delattr(owner, name)
    with pytest.raises(
        ValueError, match=rf"transformers {re.escape(transformers.__version__)} has no .*{name}, by which"
    ):
        class_rules(model)


def test_experts_that_transformers_takes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model, name = mixtral(), "MODULES_TO_PATCH_FOR_QUANTIZATION"
    monkeypatch.setattr(quantizers_base, name, {"OtherExperts"})
    assert not names.takes_experts_apart(model)
    monkeypatch.setattr(quantizers_base, name, {"MixtralExperts"})
    assert names.takes_experts_apart(model)
    monkeypatch.delattr(quantizers_base, name)
    with pytest.raises(ValueError, match=name):
        names.takes_experts_apart(model)
