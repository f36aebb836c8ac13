"""Documents of every kind, and the rows they are packed into, are compared with ids read off by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from quant.calibration.texts.rows import calibration_rows

END, TURN = 26, 27


class Letters:
    """a = 0 … z = 25, an end of text and, in chats, a turn mark before each message's role letter and content."""

    eos_token_id = END
    chat_template: str | None = "letters"

    def __len__(self) -> int:
        return 28

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") for letter in text if letter.isalpha()]}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: object) -> list[int]:
        assert options == {"tokenize": True, "return_dict": False}
        if messages[0]["role"] not in ("system", "user"):
            raise RuntimeError("a chat begins\nwith a user")
        return [i for m in messages for i in (TURN, *self(m["role"][0] + m["content"])["input_ids"])]


def rows(source: Any, seqlen: int = 4, **options: Any) -> list[list[int]]:
    found = calibration_rows(source, Letters(), samples=options.pop("samples", None), seqlen=seqlen, **options)
    assert found.dtype == torch.int64
    return found.tolist()


def test_texts_are_packed_with_an_end_after_each() -> None:
    # a b c ⊥ | d e ⊥ f | g h i j | ⊥ — the rest is dropped
    assert rows(["abc", "de", "", "fghij"]) == [[0, 1, 2, END], [3, 4, END, 5], [6, 7, 8, 9]]


def test_rows_of_texts_begin_with_the_start_token() -> None:
    class Begun(Letters):
        bos_token_id = TURN

        def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
            return {"input_ids": [TURN, *super().__call__(text)["input_ids"]]}

    # ◁ a b c ⊥ | ◁ d e ⊥: the chain of documents without its first ◁ is cut every three tokens.
    found = calibration_rows(["abc", "de"], Begun(), samples=None, seqlen=4)
    assert found.tolist() == [[TURN, 0, 1, 2], [TURN, END, TURN, 3]]
    ids = torch.tensor([[TURN, 0, 1, 2], [TURN, 3, 4, 5]])
    assert calibration_rows([ids], Begun(), samples=None, seqlen=4).tolist() == ids.tolist()


def test_unpacked_rows_are_beginnings_of_documents_long_enough() -> None:
    assert rows(["abc", "defgh", "ijkl", "mnopqrstu"], pack=False) == [[3, 4, 5, 6], [8, 9, 10, 11], [12, 13, 14, 15]]
    with pytest.raises(ValueError, match=r"1 of 2 document\(s\) have 4 tokens \(the longest has 5\); 2 are needed"):
        rows(["abc", "defgh"], pack=False, samples=2)


def test_ids_of_every_kind() -> None:
    """Ids come complete: nothing is put between them."""
    expected = [[0, 1, 2, 3], [4, 5, 6, 7]]
    ids = torch.arange(8)
    assert rows([ids[:3], ids[3:]]) == expected
    assert rows([[0, 1, 2], [3, 4, 5, 6, 7]]) == expected
    assert rows([[[0, 1, 2], [3]], [[4, 5, 6, 7]]]) == expected
    assert rows([np.arange(8).reshape(2, 4)]) == expected
    assert rows([{"input_ids": ids.reshape(2, 4).int(), "labels": ids}]) == expected
    assert rows([(ids.reshape(2, 4), torch.zeros(2))]) == expected
    assert rows([{"input_ids": [[0, 1], [2, 3, 4, 5, 6, 7]]}]) == expected
    assert rows({"input_ids": ids.reshape(2, 4)}) == rows(np.arange(8)) == expected
    # A tensor itself, rather than a list with one in it, is cut row by row.
    assert rows(torch.arange(12).reshape(2, 6)) == [[0, 1, 2, 3], [6, 7, 8, 9]]


def test_padding_is_left_out_where_the_mask_says_so() -> None:
    ids = torch.tensor([[9, 9, 0, 1, 2], [3, 4, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    expected = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows([{"input_ids": ids, "attention_mask": mask}]) == expected
    assert rows([{"input_ids": ids.tolist(), "attention_mask": mask.tolist()}]) == expected
    assert rows([{"input_ids": ids[0], "attention_mask": mask[0]}, ids[1]]) == expected


def test_data_loaders() -> None:
    ids = torch.arange(24).reshape(6, 4)
    targets = torch.full((6,), 99)
    assert rows(DataLoader(TensorDataset(ids), batch_size=2)) == ids.tolist()
    assert rows(DataLoader(TensorDataset(ids, targets), batch_size=4)) == ids.tolist()
    loader = DataLoader([{"input_ids": row, "n": 1} for row in ids], batch_size=3)
    assert rows(loader, samples=5) == ids[:5].tolist()
    texts = DataLoader([{"text": "abc"}, {"text": "def"}], batch_size=2)
    assert rows(texts) == [[0, 1, 2, END], [3, 4, 5, END]]


def test_no_more_is_read_than_the_rows_need() -> None:
    seen = []

    def endless() -> Iterator[torch.Tensor]:
        for i in range(1000):
            seen.append(i)
            yield torch.full((3,), i % 26)

    assert rows(endless(), samples=2) == [[0, 0, 0, 1], [1, 1, 2, 2]]
    assert seen == [0, 1, 2]


def test_chats_go_through_the_template() -> None:
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    shared = [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "c"}]
    # ⟨turn⟩ u a b ⟨turn⟩ a c: the chat brings its own marks and gets no end of text.
    expected = [[TURN, 20, 0, 1, TURN, 0, 2]]
    for source in ([chat], [shared], [{"messages": chat, "text": "z"}], [{"conversations": shared, "id": "x"}]):
        assert rows(source, seqlen=7) == expected
    with pytest.raises(ValueError, match="chat template refuses a chat: a chat begins with a user"):
        rows([[{"role": "assistant", "content": "c"}]], seqlen=1)
    plain = Letters()
    plain.chat_template = None
    with pytest.raises(ValueError, match="need a chat template, which the model's tokenizer does not have"):
        calibration_rows([chat], plain, samples=1, seqlen=1)


def test_columns() -> None:
    assert rows([{"id": 7, "body": "abc"}]) == [[0, 1, 2, END]]
    assert rows([{"title": "z", "body": "abc"}], column="body") == [[0, 1, 2, END]]
    assert rows([{"input_ids": [1] * 9, "body": "abc"}], column="body") == [[0, 1, 2, END]]
    assert rows([{"text": None, "body": "abc"}]) == [[0, 1, 2, END]]
    with pytest.raises(ValueError, match="no column of text that stands out; its columns are title, body"):
        rows([{"title": "z", "body": "abc"}])
    with pytest.raises(ValueError, match="no column 'content'; its columns are title, body"):
        rows([{"title": "z", "body": "abc"}], column="content")


def test_shuffling_is_reproducible_and_loses_nothing() -> None:
    documents = [torch.tensor([i % 26, i // 26]) for i in range(3000)]

    def numbers(seed: int, samples: int | None = None) -> list[int]:
        return [
            row[0] + 26 * row[1]
            for row in calibration_rows(documents, None, samples=samples, seqlen=2, seed=seed, shuffle=True).tolist()
        ]

    order = numbers(1)
    assert sorted(order) == list(range(3000)) and order != list(range(3000))
    assert numbers(1) == order and numbers(2) != order
    assert numbers(1, samples=50) == order[:50]
    assert rows([document.tolist() for document in documents[:4]], seqlen=2) == [[0, 0], [1, 0], [2, 0], [3, 0]]


def test_bad_sources() -> None:
    for empty in ([], [""], [[]], [None]):
        with pytest.raises(ValueError, match="empty, it holds no text and no token"):
            rows(empty)
    with pytest.raises(ValueError, match=r"2 document\(s\) with 5 tokens give 1 rows of 4; 3 row\(s\) need 12 tokens"):
        rows(["abc", [0]], samples=3)
    with pytest.raises(ValueError, match="token id 28 is outside the tokenizer's vocabulary of 28"):
        rows([[0, 1, 2, 28]])
    with pytest.raises(ValueError, match=r"expected token ids, integers .* found torch.float32 \[4\]"):
        rows([torch.ones(4)])
    with pytest.raises(ValueError, match="cannot take tokens from int"):
        rows([3])
    with pytest.raises(ValueError, match=r"calibration data \(Letters\): give a file, a data set, token ids"):
        calibration_rows(Letters(), samples=1, seqlen=1)
    with pytest.raises(ValueError, match="needs the model's tokenizer"):
        calibration_rows(["abc"], None, samples=1, seqlen=1)
    with pytest.raises(ValueError, match="must be at least 1"):
        rows(["abc"], samples=0)
