"""An embedding that a rule opted in is solved, saved and loaded, and gives the logits of its dequantized twin."""

from pathlib import Path

import pytest
import tiny_models
import torch
from torch import nn

from quant.base.errors import UserError
from quant.export.checkpoint.files.compressed_tensors import quantization_config
from quant.export.checkpoint.load import load
from quant.export.checkpoint.other_runtimes import runtime_warnings
from quant.export.checkpoint.save import save
from quant.kernels.linear.embedding import QuantEmbedding
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.plan_make import make_plan
from quant.recipes.recipe import Rule, get_recipe
from quant.run.api import quantize

transformers = pytest.importorskip("transformers", reason="the [hf] extra installs it")


def llama() -> nn.Module:
    return tiny_models.llama(vocab_size=96, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, seed=1)


@pytest.mark.parametrize("format", ["fp8_channel", "nvfp4"])
def test_solved_saved_and_loaded(format: str, tmp_path: Path) -> None:
    recipe = get_recipe("nvfp4a16").with_rules(Rule("*embed_tokens", format), Rule("lm_head", format))
    base = llama()
    done = quantize(llama(), recipe)
    model, plan = done.model, done.plan
    table, head = model.model.embed_tokens, model.lm_head
    assert isinstance(table, QuantEmbedding) and isinstance(head, QuantLinear)
    assert plan.by_name["model.embed_tokens"].weight is table.weight_format and table.weight_format.name == format

    twin = llama()
    for name, module in model.named_modules():
        if isinstance(module, QuantEmbedding | QuantLinear):
            twin.get_submodule(name).weight.data = module.dequantize()
    ids = torch.tensor([[3, 95, 0, 41]])
    with torch.no_grad():
        expected = twin(ids).logits
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)
        assert float((expected - base(ids).logits).abs().max()) > 1e-4

        save(model, plan, tmp_path / "out")
        loaded = load(tmp_path / "out")
        assert isinstance(loaded.model.embed_tokens, QuantEmbedding)
        torch.testing.assert_close(loaded(ids).logits, expected, rtol=0, atol=1e-5)
    targets = [t for group in quantization_config(plan)["config_groups"].values() for t in group["targets"]]
    assert "model.embed_tokens" in targets and "Linear" not in targets
    assert any("model.embed_tokens needs quant.load" in warning for warning in runtime_warnings(plan))


def test_an_embedding_that_does_more_is_refused_by_name() -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * 8

    model = llama()
    model.model.embed_tokens = Scaled(96, 64)
    recipe = get_recipe("nvfp4a16").with_rules(Rule("*embed_tokens", "fp8_channel"))
    with pytest.raises(UserError, match=r"model\.embed_tokens: cannot be in fp8_channel: it is a Scaled"):
        quantize(model, make_plan(model, recipe))
