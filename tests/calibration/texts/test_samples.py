"""Images, sounds and texts are found in folders and data sets, with the texts that belong to them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_processors import RATE, TEXTS, pixels, tone, write_images, write_pairs, write_parquet, write_sounds

from quant.calibration.texts.media_inputs import Sample, read_samples

datasets = pytest.importorskip("datasets", reason="the extra data")


def names(samples: list[Sample] | None) -> list[str]:
    return [Path(sample.name).stem for sample in samples or ()]


def test_images_of_a_folder_with_their_captions(tmp_path: Path) -> None:
    files = write_images(tmp_path / "photos", captions=True)
    (tmp_path / "photos" / "2.txt").unlink()
    found = read_samples(tmp_path / "photos", 4, pairs=False)
    assert found is not None and all(sample.has_image for sample in found)
    assert [sample.texts for sample in found] == [(TEXTS[0],), (TEXTS[1],), (), (TEXTS[3],)]
    assert np.array_equal(np.asarray(found[1].image()), pixels(1))
    assert [sample.name for sample in found] == [str(file) for file in files]


def test_files_are_taken_at_even_distances_out_of_every_class(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        write_images(tmp_path / name)
    assert [sample.name for sample in read_samples(tmp_path, 4, pairs=False) or ()] == [
        str(tmp_path / name) for name in ("cat/0.png", "cat/2.png", "dog/0.png", "dog/2.png")
    ]
    assert len(read_samples(tmp_path, 100, pairs=False) or ()) == 8


def test_a_sound_has_the_values_that_were_written(tmp_path: Path) -> None:
    write_sounds(tmp_path / "sounds", transcripts=True)
    found = read_samples(tmp_path / "sounds", 2, pairs=False) or []
    assert names(found) == ["0", "2"] and found[1].texts == (TEXTS[2],) and found[1].has_sound
    assert np.array_equal(found[1].sound(RATE), (tone(500) / 2**15).astype(np.float32))


@pytest.mark.parametrize(
    ("kind", "column", "named"),
    [("image", "caption", ""), ("audio", "sentence", ""), ("image", "what", "#what"), ("audio", "what", "#what")],
)
def test_a_data_set_gives_what_its_files_give(
    kind: str, column: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with a parquet file, as `datasets` writes it, by `hf:` and by its path."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write = write_images if kind == "image" else write_sounds
    write(tmp_path / "files")
    (tmp_path / "set").mkdir()
    files, file = sorted((tmp_path / "files").iterdir()), tmp_path / "set" / "train.parquet"
    write_parquet(files, kind, file, column)
    wanted = read_samples(tmp_path / "files", 4, pairs=False) or []
    for source in (f"hf:{tmp_path / 'set'}{named}", f"{file}{named}"):
        found = read_samples(source, 4, pairs=False) or []
        assert [sample.content for sample in found] == [sample.content for sample in wanted]
        assert [sample.texts for sample in found] == [(text,) for text in TEXTS]


def test_a_folder_of_images_with_a_table_of_captions(tmp_path: Path) -> None:
    """`datasets` reads the captions of an image folder from metadata.jsonl."""
    files = write_images(tmp_path / "photos")
    lines = [json.dumps({"file_name": f.name, "text": text}) for f, text in zip(files, TEXTS, strict=True)]
    (tmp_path / "photos" / "metadata.jsonl").write_text("\n".join(lines))
    found = read_samples(tmp_path / "photos", 4, pairs=False) or []
    assert {sample.texts for sample in found} == {(text,) for text in TEXTS}
    assert {sample.content for sample in found} == {file.read_bytes() for file in files}


@pytest.mark.parametrize(
    ("record", "named", "texts"),
    [
        ({"document": "a", "summary": "b"}, "", ("a", "b")),
        ({"summary": "b", "document": "a", "id": "1"}, "", ("a", "b")),
        ({"x": "a", "y": "b"}, "#y,x", ("b", "a")),
        ({"translation": {"en": "a", "de": "b"}}, "", ("a", "b")),
        ({"translation": {"en": "a", "de": "b", "fr": "c"}}, "", ("a", "b")),
        ({"text": "a", "id": 3}, "", ("a",)),
    ],
)
def test_pairs_of_texts(record: dict[str, Any], named: str, texts: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    assert [s.texts for s in read_samples(f"{tmp_path / 'a.jsonl'}{named}", 1, pairs=True) or ()] == [texts]
    if not named:
        assert read_samples(f"{tmp_path / 'a.jsonl'}", 1, pairs=False) is None


def test_what_is_no_sample_is_left_to_others(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("words")
    assert read_samples(tmp_path / "text.txt", 1, pairs=True) is None
    write_pairs(tmp_path / "pairs.jsonl")
    assert read_samples(tmp_path / "pairs.jsonl", 1, pairs=False) is None


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    broken = (read_samples(tmp_path, 1, pairs=False) or [])[0]
    with pytest.raises(ValueError, match=r"a\.png: no image that can be read") as caught:
        broken.image()
    assert "\n" not in str(caught.value)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"a\.txt: not UTF-8 text"):
        read_samples(tmp_path, 1, pairs=False)
    write_pairs(tmp_path / "pairs.jsonl")
    with pytest.raises(ValueError, match=re.escape("no column 'title'; its columns are document, summary")):
        read_samples(f"{tmp_path / 'pairs.jsonl'}#title", 1, pairs=True)


def test_a_table_without_its_images_is_read_once_they_are_there(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    rows = {"image": [{"bytes": None, "path": str(tmp_path / "later.png")}], "text": ["a photo"]}
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pydict(rows, schema=features.arrow_schema), tmp_path / "table.parquet"
    )
    with pytest.raises(ValueError, match=r"record 0: .*later\.png is not a file; download the data set, with"):
        read_samples(tmp_path / "table.parquet", 1, pairs=False)
    write_images(tmp_path / "images")[0].rename(tmp_path / "later.png")
    (sample,) = read_samples(tmp_path / "table.parquet", 1, pairs=False) or ()
    assert np.array_equal(np.asarray(sample.image()), pixels(0)) and sample.texts == ("a photo",)
