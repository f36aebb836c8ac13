"""The KV cache of a model has the name that its version of transformers gives it."""

from types import SimpleNamespace

import pytest

from quant.recipes.blocks import cache_argument, cache_of


class Renamed:
    def forward(self, input_ids: object, cache: object = None) -> None: ...


class Earlier:
    def forward(self, input_ids: object, past_key_values: object = None) -> None: ...


def test_it_goes_in_and_comes_out_by_either_name() -> None:
    assert cache_argument(Renamed(), 1) == {"cache": 1}
    assert cache_argument(Earlier(), 1) == {"past_key_values": 1}
    assert cache_of(SimpleNamespace(cache=2)) == cache_of(SimpleNamespace(past_key_values=2)) == 2
    assert cache_of(SimpleNamespace(logits=3)) is None


def test_a_model_of_this_transformers_takes_what_it_gave() -> None:
    pytest.importorskip("transformers", reason="the extra hf")
    import tiny_models
    import torch

    model = tiny_models.llama()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        cache = cache_of(model(ids[:, :8], use_cache=True))
        found = model(ids[:, 8:], **cache_argument(model, cache)).logits
        torch.testing.assert_close(found, model(ids).logits[:, 8:], rtol=1e-4, atol=1e-5)
