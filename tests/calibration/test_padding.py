"""Padding enters no statistic: padded data give what the same texts give one by one, without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import tiny_models
import torch
from slow_cases import quick_cases
from torch import nn
from torch.utils.data import DataLoader

import quant
from quant.calibration.inputs import inputs_of, recorded, unpadded

TEXTS = [torch.randint(3, 60, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 14, 14, 6, 11)]
IDS = ["input_ids", "attention_mask"]


def _llama() -> Any:
    """The token that pads has an embedding that no text reaches."""
    model = tiny_models.llama(gain=3)
    model.model.embed_tokens.weight.data[0, ::7] = 40.0
    return model


def _t5() -> Any:
    model = tiny_models.t5(gain=3, decoder_start_token_id=0, pad_token_id=0)
    model.shared.weight.data[0, ::7] = 40.0
    return model


def _padded(side: str, width: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.zeros(len(TEXTS), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(TEXTS):
        place = slice(width - len(text), width) if side == "left" else slice(len(text))
        ids[row, place], mask[row, place] = text, 1
    return {"input_ids": ids, "attention_mask": mask}


def _texts() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": text[None], "attention_mask": torch.ones(1, len(text), dtype=torch.int64)} for text in TEXTS]


def _loop(side: str) -> Callable[[nn.Module], None]:
    def loop(model: nn.Module) -> None:
        for start in range(0, len(TEXTS), 2):
            model(*(tensor[start : start + 2] for tensor in _padded(side).values()))

    return loop


def _loader(side: str) -> Any:
    return DataLoader([{n: t[row] for n, t in _padded(side).items()} for row in range(len(TEXTS))], batch_size=3)


WAYS: dict[str, Callable[[str], dict[str, Any]]] = {
    "names": lambda side: {"data": _padded(side)},
    "loader": lambda side: {"data": _loader(side)},
    "positions": lambda side: {"data": [tuple(_padded(side).values())]},
    "loop": lambda side: {"forward_loop": _loop(side)},
}


@cache
def _from_texts(recipe: str, solver: str) -> dict[str, torch.Tensor]:
    """The tensors that texts give one by one."""
    return quant.quantize(_llama(), recipe, _texts(), solver=solver).model.state_dict()


SOLVED = [("fp8", "rtn"), ("nvfp4", "awq:merge+gptq"), ("nvfp4a16", "gptq+autoround:2")]


@pytest.mark.parametrize(
    ("recipe", "solver", "way", "side"),
    quick_cases(
        ((*solved, way, side) for solved in SOLVED for way in WAYS for side in ("left", "right")),
        # Every way and side with each solver once, and all of them with the quickest.
        lambda recipe, solver, way, side: solver == "rtn" or (list(WAYS).index(way) % 2 == 0) == (side == "left"),
    ),
)
def test_padded_data_give_what_the_texts_give(recipe: str, solver: str, way: str, side: str) -> None:
    expected = _from_texts(recipe, solver)
    found = quant.quantize(_llama(), recipe, solver=solver, **WAYS[way](side)).model.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_scales_of_the_cache_and_of_experts_see_no_padding() -> None:
    found = []
    for data in (_texts(), _padded("left")):
        model = tiny_models.qwen3_moe(gain=3)
        model.model.embed_tokens.weight.data[0, ::7] = 40.0
        plan = replace(quant.make_plan(model, "nvfp4", solver="gptq"), kv_cache=quant.FORMATS["fp8"])
        found.append(quant.quantize(model, plan, data).model.state_dict())
    expected, padded = found
    assert any(name.endswith("k_scale") for name in expected)
    assert padded.keys() == expected.keys() and all(torch.equal(padded[name], expected[name]) for name in expected)


def test_what_is_said_of_tokens_is_cut_with_them() -> None:
    """Positions and labels along with the ids of their own side, and nothing that only looks like it."""
    call = {
        "input_ids": torch.tensor([[0, 0, 5, 6], [7, 8, 9, 4]]),
        "attention_mask": torch.tensor([[False, False, True, True], [True] * 4]),
        "position_ids": torch.tensor([[1, 1, 0, 1], [0, 1, 2, 3]]),
        "pixel_values": torch.arange(2 * 4 * 3.0).view(2, 4, 3),
        "decoder_input_ids": torch.tensor([[1, 2, 3, 0], [1, 2, 0, 0]]),
        "decoder_attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]),
        "labels": torch.tensor([[2, 3, 2, -100], [2, 2, -100, -100]]),
        "use_cache": False,
    }
    found = unpadded(call, list(call))
    assert found is not None
    first, second = found
    assert first["input_ids"].tolist() == [[5, 6]] and second["input_ids"].tolist() == [[7, 8, 9, 4]]
    assert first["attention_mask"].tolist() == [[True, True]] and first["position_ids"].tolist() == [[0, 1]]
    assert torch.equal(torch.cat([first["pixel_values"], second["pixel_values"]]), call["pixel_values"])
    assert first["decoder_input_ids"].tolist() == [[1, 2, 3]] and second["decoder_input_ids"].tolist() == [[1, 2]]
    assert first["labels"].tolist() == [[2, 3, 2]] and second["labels"].tolist() == [[2, 2]]
    assert first["use_cache"] is False
    del call["decoder_input_ids"], call["decoder_attention_mask"]
    for takes, labels in ((["decoder_input_ids"], [[2, 3, 2]]), ([], [[2, -100]])):
        found = unpadded(call, takes)
        assert found is not None and found[0]["labels"].tolist() == labels


@pytest.mark.parametrize("length", [14, 9])
def test_calls_without_padding_stay_as_they_are(length: int) -> None:
    ids = torch.stack([text[:length] for text in TEXTS if len(text) >= length])
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    model = _llama()
    (found,) = inputs_of([call], model).calls
    assert found[1]["input_ids"] is ids and found[1]["attention_mask"] is call["attention_mask"]
    (args, _) = recorded(model, lambda model: model(ids, call["attention_mask"])).calls[0]
    assert args[0] is ids


def test_a_mask_of_another_shape_is_none_of_padding() -> None:
    ids = torch.stack([text[:6] for text in TEXTS])
    mask = torch.ones(5, 1, 6, 6, dtype=torch.bool).tril()
    assert unpadded({"input_ids": ids, "attention_mask": mask}, []) is None


def test_batches_that_cannot_be_taken_apart_are_told() -> None:
    call = {**_padded("right"), "pixel_values": torch.zeros(7, 3, 4, 4)}
    with pytest.warns(UserWarning, match="give one text a call"):
        assert unpadded(call, []) is None
    one = {**{name: call[name][:1] for name in IDS}, "pixel_values": call["pixel_values"]}
    found = unpadded(one, [])
    assert found is not None and torch.equal(found[0]["input_ids"], TEXTS[0][None])
    assert found[0]["pixel_values"] is call["pixel_values"]


def test_labels_in_the_place_of_a_mask_are_refused() -> None:
    ids = torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :2] = -100
    for wrong in (ids + 7, labels, torch.where(ids > 20, 0.0, -torch.inf)):
        with pytest.raises(ValueError, match=r"attention_mask holds values from .* pass only x"):
            unpadded({"input_ids": ids, "attention_mask": wrong}, ())
    packed = torch.tensor([[1, 1, 2, 2, 3, 3], [1, 1, 1, 1, 2, 2]])  # numbers of packed texts
    assert unpadded({"input_ids": ids, "attention_mask": packed}, ()) is None


def test_rows_of_padding_alone_are_left_out() -> None:
    call = _padded("right")
    call["attention_mask"][1] = 0
    assert len(inputs_of(call, _llama())) == len(TEXTS) - 1
    call["attention_mask"][:] = 0
    with pytest.raises(ValueError, match="hides every token"):
        inputs_of(call, _llama())


def test_the_decoder_of_an_encoder_decoder_sees_no_padding() -> None:
    written = TEXTS[3]
    padded = {
        **_padded("right"),
        "decoder_input_ids": torch.cat([written, written.new_zeros(4)]).repeat(len(TEXTS), 1),
        "decoder_attention_mask": torch.tensor([[1] * 6 + [0] * 4] * len(TEXTS)),
    }
    decoder = {"decoder_input_ids": written[None], "decoder_attention_mask": torch.ones(1, 6)}
    expected = [{**text, **decoder} for text in _texts()]
    found = []
    for data in (expected, padded):
        found.append(quant.quantize(_t5(), "fp8", data, solver="gptq").model.state_dict())
    assert all(torch.equal(found[1][name], found[0][name]) for name in found[0])


@pytest.mark.parametrize("with_ids", [False, True])
def test_labels_of_a_collator_say_what_pads_the_decoder(with_ids: bool) -> None:
    """-100 at their end; the model shifts them, or the collator has done so, and there is no mask of the decoder."""
    labels = torch.full((len(TEXTS), 16), -100)
    for row, text in enumerate(TEXTS):
        labels[row, : len(text)] = text
    labels[0, 2] = -100  # inside of a text it hides no token from those behind it
    written = {"labels": labels}
    if with_ids:
        written["decoder_input_ids"] = nn.functional.pad(labels, (1, -1)).clamp(min=0)
    rows = [{n: t[row : row + 1, : len(text)] for n, t in written.items()} for row, text in enumerate(TEXTS)]
    found = []
    for data in ([{**text, **row} for text, row in zip(_texts(), rows, strict=True)], {**_padded("right"), **written}):
        found.append(quant.quantize(_t5(), "fp8", data, solver="gptq").model.state_dict())
    assert all(torch.equal(found[1][name], found[0][name]) for name in found[0])


def test_embeddings_and_sounds_have_a_mask_as_ids_do() -> None:
    embedded, mask = torch.randn(5, 16, 64, generator=torch.Generator().manual_seed(0)), _padded("left")[IDS[1]]
    embedded[mask == 0] = 50.0
    rows = [{"inputs_embeds": row[own.bool()][None]} for row, own in zip(embedded, mask, strict=True)]
    found = []
    for data in (rows, {"inputs_embeds": embedded, "attention_mask": mask}):
        found.append(quant.quantize(_llama(), "fp8", data, solver="rtn").model.state_dict())
    assert all(torch.equal(found[1][name], found[0][name]) for name in found[0])
    call = {"input_values": embedded[..., 0], "attention_mask": mask}
    cut = unpadded(call, list(call)) or []
    assert [each["input_values"].shape[1] for each in cut] == [len(text) for text in TEXTS]
