"""Before torch is imported, a command hides packages that a text model never uses, and has its files read ahead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from samples import ROOT

from quant.models.startup import files_to_read, is_text_model, read_ahead, skip_image_packages

LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "rope_scaling": {"factor": 2.0}}
PROBE = """
import sys
from quant.models.startup import skip_image_packages
print(skip_image_packages(sys.argv[1]))
assert not {"torchvision", "sklearn", "scipy"} & sys.modules.keys()
import transformers.utils.import_utils as utils
print(utils.is_torchvision_available(), utils.is_torchvision_v2_available(), utils.is_sklearn_available(),
      utils.is_scipy_available())
"""
# Everything that the command asks transformers for, and an image processor, which works as without torchvision.
CLASSES = """
transformers.LlamaForCausalLM, transformers.AutoTokenizer, transformers.GenerationConfig
import transformers.generation.candidate_generator, importlib.util, numpy
pixels = transformers.ViTImageProcessor(size={"height": 4, "width": 4})(numpy.zeros((8, 8, 3), "uint8"))
print(pixels["pixel_values"][0].shape)
print(importlib.util.find_spec("torchvision") is not None)
"""


def model(folder: Path, config: Any, *files: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in files:
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("changes", "files"),
    [
        ({}, ["preprocessor_config.json"]),
        ({}, ["processor_config.json"]),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, []),
        ({"architectures": ["LlamaForCausalLM", "ViTModel"]}, []),
        ({"architectures": []}, []),
        ({"architectures": "LlamaForCausalLM"}, []),
        ({"architectures": ["FuyuForCausalLM"], "image_size": 300}, []),
        ({"text": {"deep": {"vision_config": {}}}}, []),
        ({"num_mel_bins": 80}, []),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, []),
    ],
)
def test_other_models_than_those_of_text(tmp_path: Path, changes: dict[str, Any], files: list[str]) -> None:
    assert is_text_model(model(tmp_path / "text", LLAMA, "generation_config.json", "tokenizer.json"))
    assert not is_text_model(model(tmp_path / "other", {**LLAMA, **changes}, *files))


def test_a_file_that_cannot_be_read_is_no_text_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert not is_text_model(tmp_path) and not is_text_model(tmp_path / "config.json")


def test_a_process_that_has_loaded_torch_is_left_alone(tmp_path: Path) -> None:
    assert not skip_image_packages(str(model(tmp_path / "text", LLAMA)))


@pytest.mark.slow
def test_a_rank_has_torch_and_skips_them_too(tmp_path: Path) -> None:
    """It has met the others; two H200 needed 4 s more to load than one before."""
    command = [sys.executable, "-c", f"import torch{PROBE}", str(model(tmp_path / "text", LLAMA))]
    for world, skipped in (("2", True), ("1", False)):
        done = subprocess.run(command, env={**os.environ, "WORLD_SIZE": world}, capture_output=True, text=True)
        assert done.stdout.splitlines()[0] == str(skipped), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("is_text", [True, False], ids=["text", "image"])
def test_packages_of_images_are_not_imported(tmp_path: Path, is_text: bool) -> None:
    """The packages are found, and cannot be imported, as it is with a torchvision of another torch."""
    pytest.importorskip("transformers")
    pytest.importorskip("PIL")
    for name in ("torchvision", "sklearn", "scipy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('is imported')")
    folder = model(tmp_path / "model", LLAMA, *([] if is_text else ["preprocessor_config.json"]))
    source = PROBE + (CLASSES.replace("\ntransformers", "\nimport transformers\ntransformers", 1) if is_text else "")
    paths = os.pathsep.join([str(ROOT), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", source, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    expected = ["True", "False False False False", "(3, 4, 4)", "True"] if is_text else ["False", "True True True True"]
    assert done.stdout.splitlines() == expected


def test_weight_files_are_those_that_loading_reads(tmp_path: Path) -> None:
    for name in ("model-00002-of-2.safetensors", "model-00001-of-2.safetensors", "pytorch_model.bin", "config.json",
                 "consolidated.safetensors"):  # fmt: skip
        (tmp_path / name).write_bytes(b"0")
    assert [file.name for file in files_to_read(tmp_path)] == [f"model-0000{i}-of-2.safetensors" for i in (1, 2)]
    assert files_to_read(tmp_path / "config.json") == [tmp_path / "config.json"]
    assert files_to_read(tmp_path / "missing") == []
    for name in ("transformer", "vae"):
        (tmp_path / "pipeline" / name).mkdir(parents=True)
        (tmp_path / "pipeline" / name / "diffusion_pytorch_model.safetensors").write_bytes(b"0")
    assert [file.parent.name for file in files_to_read(tmp_path / "pipeline")] == ["transformer", "vae"]


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel what it has cached")
def test_files_are_in_the_page_cache_afterwards(tmp_path: Path) -> None:
    size = (40 << 20) + 5
    for name in ("model-1.safetensors", "model-2.safetensors"):
        with (tmp_path / name).open("wb") as file:
            file.write(os.urandom(size))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    thread = read_ahead(str(tmp_path))
    assert thread is not None
    thread.join(60)
    for name in ("model-1.safetensors", "model-2.safetensors"):
        with (tmp_path / name).open("rb", buffering=0) as file:
            for offset in range(0, size, 1 << 20):
                try:
                    assert os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT) == 1
                except OSError as error:
                    pytest.skip(f"the file system does not say: {error}") if error.errno == 95 else pytest.fail(name)
