"""Text that a model writes is compared with the model's own probabilities, and with running it without a cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from torch import nn

from quant.calibration.session import Session
from quant.calibration.texts import self_written
from quant.calibration.texts.rows import calibration_rows
from quant.calibration.texts.self_written import _rows_at_once, generate_rows


class Chain(nn.Module):
    """A Markov chain: the logits after a token are that token's row of a table."""

    def __init__(self, tokens: int, **config: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(tokens, tokens)
        self.table.weight.data = torch.randn(tokens, tokens, generator=torch.Generator().manual_seed(5))
        self.config = SimpleNamespace(**config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


class Alone(nn.Module):
    """A transformers model whose cache is out of sight."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def tiny_llama(**options: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 48, "initializer_range": 0.4}
    return tiny_models.llama(**sizes, **({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None} | options))


def test_transitions_have_the_model_s_probabilities() -> None:
    model = Chain(6, bos_token_id=0, eos_token_id=[1])
    rows = generate_rows(model, samples=96, seqlen=201)
    assert rows.dtype == torch.int64 and bool((rows[:, 0] == 0).all())
    assert int(rows[:, 1:].min()) == 2
    logits = model.table.weight.detach().double()
    logits[:, :2] = -torch.inf  # start and end are never drawn
    expected = logits.softmax(-1)
    counts = torch.zeros(6, 6, dtype=torch.float64)
    counts.index_put_((rows[:, :-1].flatten(), rows[:, 1:].flatten()), torch.ones(96 * 200).double(), accumulate=True)
    total = counts.sum(1, keepdim=True)
    deviation = (counts - total * expected).abs()
    assert bool((deviation <= 4.5 * (total * expected * (1 - expected)).sqrt()).all())


def test_without_a_start_token() -> None:
    """A random token, the four likeliest ones after it, then draws."""
    model = Chain(40, eos_token_id=7)
    rows = generate_rows(model, samples=300, seqlen=6)
    assert len(set(rows[:, 0].tolist())) > 35 and 7 not in rows
    table = model.table.weight.detach().clone()
    table[:, 7] = -torch.inf
    successor = table.argmax(-1)
    for position in range(4):
        assert torch.equal(rows[:, position + 1], successor[rows[:, position]])
    assert not torch.equal(rows[:, 5], successor[rows[:, 4]])


def test_the_cache_changes_nothing() -> None:
    model = tiny_llama()
    rows = generate_rows(model, samples=5, seqlen=40, session=Session(seed=3))
    assert torch.equal(rows, generate_rows(Alone(model), samples=5, seqlen=40, session=Session(seed=3)))
    assert len({tuple(row) for row in rows.tolist()}) == 5


def test_seeds_and_numbers_of_rows() -> None:
    model = tiny_llama()
    rows = generate_rows(model, samples=66, seqlen=20)
    assert torch.equal(generate_rows(model, samples=66, seqlen=20), rows)
    assert torch.equal(generate_rows(model, samples=3, seqlen=20), rows[:3])
    assert torch.equal(rows[64:], generate_rows(model, samples=72, seqlen=20)[64:66])
    other = generate_rows(model, samples=66, seqlen=20, session=Session(seed=1))
    assert float((other[:, 1:] == rows[:, 1:]).float().mean()) < 0.3
    # Row 1 of one seed is not row 0 of the next.
    assert not torch.equal(other[0], rows[1])


def test_a_gpu_writes_as_many_rows_as_an_eighth_of_its_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.llama(num_hidden_layers=2, hidden_size=128)  # half as many key-value heads as others
    assert model.config.num_attention_heads == 2 * model.config.num_key_value_heads
    assert _rows_at_once(model, 512) == 64
    monkeypatch.setattr(self_written, "device_of", lambda _: torch.device("cuda"))
    for memory, rows in ((1 << 30, 256), (1 << 20, 64), (1 << 40, 1024)):  # 2 x 2 x 64 x 512 floats a row: 512 kB
        size = SimpleNamespace(total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, size=size: size)
        assert _rows_at_once(model, 512) == rows
    assert _rows_at_once(nn.Linear(2, 2), 512) == 64  # no config tells


def test_special_and_padding_tokens_are_never_drawn() -> None:
    class Tokenizer:
        bos_token_id = 9
        all_special_ids = (9, 10, 11)

        def __len__(self) -> int:
            return 20

    rows = generate_rows(tiny_llama(), Tokenizer(), samples=40, seqlen=30)
    assert set(rows[:, 0].tolist()) == {9}
    assert set(rows[:, 1:].flatten().tolist()) == set(range(20)) - {1, 2, 9, 10, 11}


def test_model_and_generators_are_left_as_they_were() -> None:
    model = tiny_llama().train()
    model.lm_head.eval()
    state, done = torch.get_rng_state(), []
    generate_rows(model, samples=65, seqlen=4, session=Session(progress=lambda _, *counts: done.append(counts)))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and model.model.training and not model.lm_head.training
    assert model.config._attn_implementation == "sdpa"
    assert done == [(64, 260), (128, 260), (192, 260), (256, 260), (257, 260), (258, 260), (259, 260), (260, 260)]


def test_default_source_of_calibration() -> None:
    model = tiny_llama()
    expected = generate_rows(model, samples=2, seqlen=9, session=Session(seed=4))
    for source in (None, "self"):
        assert torch.equal(calibration_rows(source, model=model, samples=2, seqlen=9, seed=4), expected)
    with pytest.raises(ValueError, match="needs the model and a number of samples"):
        calibration_rows("self", samples=2, seqlen=9)


def test_models_that_cannot_write() -> None:
    class Sees(Chain):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids).flip(1)

    class Pools(Chain):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids).mean(1)

    broken = Chain(8, bos_token_id=0)
    broken.table.weight.data[:] = torch.nan
    cases = [
        (Sees(8, bos_token_id=0), "Sees cannot write .* depends on later tokens"),
        (Pools(8, bos_token_id=0), r"Pools cannot write .* does not give logits \[rows, tokens, vocabulary\]"),
        (Chain(8, is_encoder_decoder=True), "Chain cannot write .* an encoder with a decoder"),
        (Chain(8, max_position_embeddings=3), "seqlen=4: Chain has 3 positions"),
        (Chain(1, eos_token_id=0), "every token of its vocabulary is special"),
        (nn.Linear(2, 2), "Linear cannot write .* no embedding; pass|Linear cannot write .* no embedding of token ids"),
        (broken, "Chain gives NaN or infinite logits at position 0"),
    ]
    for model, message in cases:
        with pytest.raises(ValueError, match=message):
            generate_rows(model, samples=1, seqlen=4)
