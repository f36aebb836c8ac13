"""Models of images, sounds and two texts are calibrated and evaluated on files, as by hand through their processors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import tiny_processors
import torch
from click.testing import CliRunner
from plan_samples import planned
from safetensors.torch import load_file
from tiny_processors import RATE, TEXTS, tone

import quant
from quant.calibration.session import Session
from quant.calibration.texts.media_inputs import TOKENS, lacks_decoder_text, read_inputs, write_decoder_text
from quant.cli.main import main
from quant.recipes.layers import LayerKind

tokenizers = pytest.importorskip("tokenizers", reason="the extra hf")
transformers = pytest.importorskip("transformers", reason="the extra hf")
Call = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """A tiny model with its processor, the files that it reads, and the same inputs prepared by hand."""

    write: Callable[[Path], Any]
    files: Callable[[Path], Any]
    calls: Callable[[Path, Any], list[Call]]
    source: str
    how: tuple[str, ...] = ("nvfp4",)
    least: float = 1e-5


def opened(file: Path) -> Any:
    return pytest.importorskip("PIL.Image", reason="pillow, for images").open(file).convert("RGB")


def image_calls(directory: Path, files: list[Path]) -> list[Call]:
    processor = transformers.AutoImageProcessor.from_pretrained(directory)
    return [dict(processor(images=opened(file), return_tensors="pt")) for file in files]


def clip_calls(directory: Path, files: list[Path]) -> list[Call]:
    processor = transformers.CLIPProcessor.from_pretrained(directory)
    pairs = zip(files, TEXTS, strict=True)
    return [dict(processor(images=opened(file), text=text, return_tensors="pt")) for file, text in pairs]


def llava_calls(directory: Path, files: list[Path]) -> list[Call]:
    processor = transformers.LlavaProcessor.from_pretrained(directory)
    pairs = zip(files, TEXTS, strict=True)
    return [dict(processor(images=opened(f), text=f"<image>\n{text}", return_tensors="pt")) for f, text in pairs]


def whisper_calls(directory: Path, files: list[Path]) -> list[Call]:
    processor = transformers.WhisperProcessor.from_pretrained(directory)
    calls = []
    for number, text in enumerate(TEXTS):
        sound = tone(200 + 150 * number) / 2**15
        features = processor.feature_extractor(sound, sampling_rate=RATE, return_tensors="pt").input_features
        ids = processor.tokenizer(text).input_ids
        calls.append({"input_features": features, "decoder_input_ids": torch.tensor([ids[:-1]])})
    return calls


def t5_calls(directory: Path, pairs: list[tuple[str, str]]) -> list[Call]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    calls = []
    for one, other in pairs:
        start = [tokenizer.pad_token_id, *tokenizer(other).input_ids[:-1]]
        encoded = dict(tokenizer(one, return_tensors="pt"))
        calls.append({**encoded, "decoder_input_ids": torch.tensor([start])})
    for call in calls:
        call.pop("token_type_ids", None)
    return calls


def captioned(folder: Path) -> list[Path]:
    return tiny_processors.write_images(folder, captions=True)


def spoken(folder: Path) -> list[Path]:
    return tiny_processors.write_sounds(folder, transcripts=True)


KINDS = {
    "vit": Kind(tiny_processors.write_vit, tiny_processors.write_images, image_calls, "photos"),
    "resnet": Kind(
        tiny_processors.write_resnet, tiny_processors.write_images, image_calls, "photos", ("fp8",), least=1e-9
    ),
    "clip": Kind(tiny_processors.write_clip, captioned, clip_calls, "photos"),
    "llava": Kind(tiny_processors.write_llava, captioned, llava_calls, "photos", ("nvfp4", "gptq")),
    "whisper": Kind(tiny_processors.write_whisper, spoken, whisper_calls, "sounds", ("nvfp4", "gptq")),
    "t5": Kind(tiny_processors.write_t5, tiny_processors.write_pairs, t5_calls, "pairs.jsonl"),
}


def command(*arguments: Any) -> Any:
    return CliRunner().invoke(main, [*map(str, arguments), "--device", "cpu"])


@pytest.mark.filterwarnings("ignore:.*need quant.load:UserWarning")
@pytest.mark.parametrize("name", KINDS)
def test_a_model_is_calibrated_and_evaluated_on_files(name: str, tmp_path: Path) -> None:
    kind, model_path, source, out = KINDS[name], tmp_path / "model", tmp_path / KINDS[name].source, tmp_path / "out"
    model = kind.write(model_path)
    calls = kind.calls(model_path, kind.files(source))
    format, solver = kind.how[0], kind.how[1] if len(kind.how) > 1 else None
    options = ("--format", format, "--calib", source, "--calib-samples", 4, "--out", out)
    done = command("quantize", model_path, *options, *(("--solver", solver) if solver else ()))
    assert done.exit_code == 0, done.output
    assert f"calibrating on {source}: 4 " in done.output

    expected = quant.quantize(model, format, calls, solver=solver)
    quant.save(expected.model, expected.plan, tmp_path / "expected", allow_missing=True)
    found, wanted = (load_file(tmp_path / part / "model.safetensors") for part in ("out", "expected"))
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)

    done = command("evaluate", out, "--data", source, "--samples", 4, "--baseline", model_path, "--json")
    assert done.exit_code == 0, done.output
    by_hand = measured(type(model).from_pretrained(model_path), quant.load(out), calls)
    figures = json.loads(done.stdout)
    for key, value in by_hand.items():
        assert figures[key] == (None if value is None else pytest.approx(value, rel=2e-4, abs=1e-7)), key
    assert (figures["kl"] if "kl" in by_hand else figures["error"]) > kind.least


def measured(original: Any, quantized: Any, calls: list[Call]) -> dict[str, Any]:
    """The figures of an evaluation, in float64 from the outputs of both models."""
    with torch.no_grad():
        results = [(call, original(**call), quantized(**call)) for call in calls]
    if hasattr(results[0][1], "image_embeds"):
        apart = []
        for name in ("text_embeds", "image_embeds"):
            base, found = (torch.cat([result[i][name] for result in results]).double() for i in (1, 2))
            cosine = float((1 - (base * found).sum(1) / (base.norm(dim=1) * found.norm(dim=1))).mean())
            apart.append((cosine, float((found - base).norm() / base.norm())))
        return {"cosine": (apart[0][0] + apart[1][0]) / 2, "error": max(a[1] for a in apart), "tokens": len(calls)}
    kl, same, nll, count = 0.0, 0, 0.0, 0
    for call, base, found in results:
        ids = call.get("decoder_input_ids", call.get("input_ids"))
        p, q = (result.logits.double().softmax(-1).flatten(0, -2) for result in (base, found))
        if ids is not None:
            image = getattr(original.config, "image_token_id", None)
            kept = [i for i in range(ids.shape[1] - 1) if int(ids[0, i + 1]) != image]
            nll -= sum(float(q[i, ids[0, i + 1]].log()) for i in kept)
            p, q = p[kept], q[kept]
        kl += float((p * (p / q).log()).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        count += len(p)
    of_text = {"perplexity": float(torch.tensor(nll / count).exp())} if nll else {"perplexity": None}
    return {"kl": kl / count, "top1": same / count, "tokens": count, **of_text}


def test_a_decoder_without_a_text_reads_what_the_model_writes(tmp_path: Path) -> None:
    """Compared with `generate` of transformers: a T5 on a plain text, whose rows its encoder reads."""
    model = tiny_processors.write_t5(tmp_path)
    (tmp_path / "text.txt").write_text("some words of a text, and some more. " * 4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    inputs = read_inputs(tmp_path / "text.txt", model, lambda: tokenizer, samples=3, seqlen=17)
    assert inputs is not None and lacks_decoder_text(inputs)
    written = write_decoder_text(model, inputs, Session())
    for _, call in written.calls:
        assert call["input_ids"].shape == (1, 17) and call["input_ids"][0, -1] == tokenizer.eos_token_id
        wanted = model.generate(
            input_ids=call["input_ids"], do_sample=False, num_beams=1, max_new_tokens=TOKENS, min_new_tokens=1
        )
        ends = (wanted[0] == tokenizer.eos_token_id).nonzero()
        assert call["decoder_input_ids"].tolist() == wanted[:, : int(ends[0]) if len(ends) else None].tolist()
    assert written.own_text and not lacks_decoder_text(written)


def test_a_text_that_the_tokenizer_does_not_know_is_refused(tmp_path: Path) -> None:
    """The rows are unknown tokens alone, of which nothing is left for the encoder."""
    model = tiny_processors.write_t5(tmp_path)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "word": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    (tmp_path / "text.txt").write_text("others " * 40)
    with pytest.raises(ValueError, match=r"text\.txt, row 0: has no token that the tokenizer knows"):
        read_inputs(tmp_path / "text.txt", model, lambda: tokenizer, samples=2, seqlen=16)
    (tmp_path / "text.txt").write_text("word " * 40)
    assert read_inputs(tmp_path / "text.txt", model, lambda: tokenizer, samples=2, seqlen=16) is not None


def test_a_model_that_writes_its_own_texts_has_no_perplexity(tmp_path: Path) -> None:
    tiny_processors.write_whisper(tmp_path / "model")
    tiny_processors.write_sounds(tmp_path / "sounds")
    given = ("--data", tmp_path / "sounds", "--samples", 2)
    done = command("evaluate", tmp_path / "model", *given, "--baseline", tmp_path / "model", "--json")
    figures = json.loads(done.stdout)
    assert (figures["perplexity"], figures["kl"], figures["top1"]) == (None, 0, 1) and figures["tokens"] > 2
    assert (
        "0 of them with a text for the decoder; the model wrote the others"
        in command("evaluate", tmp_path / "model", *given).output
    )


TEMPLATE = (
    "{{ bos_token }}{% for turn in messages %}{{ turn.role }}:{% for part in turn.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{{ 'assistant:' if add_generation_prompt else '' }}"
)


@pytest.mark.parametrize(("template", "captions", "text"), [
    (None, True, f"<s><image>\n{TEXTS[1]}"),
    (None, False, "<s><image>\nDescribe the image."),
    (TEMPLATE, True, f"<s>user:<image>Describe the image.\nassistant:{TEXTS[1]}\n"),
    (TEMPLATE, False, "<s>user:<image>Describe the image.\nassistant:"),
])  # fmt: skip
def test_images_stand_in_a_dialogue(template: str | None, captions: bool, text: str, tmp_path: Path) -> None:
    model = tiny_processors.write_llava(tmp_path / "model", template)
    tiny_processors.write_images(tmp_path / "photos", captions)
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "model")
    inputs = read_inputs(tmp_path / "photos", model, lambda: processor, samples=4, seqlen=512)
    assert inputs is not None
    ids = inputs.calls[1][1]["input_ids"][0]
    shown = processor.tokenizer.decode(ids[ids != model.config.image_token_id], skip_special_tokens=False)
    assert shown == text.replace("<image>", "") and int((ids == model.config.image_token_id).sum()) == 16
    told = "4 of them with a text" if captions else "0 of them with a text of their own, the others with 'Describe"
    assert told in inputs.about


def test_a_budget_and_a_limit_on_images(tmp_path: Path) -> None:
    """Allocations measure on one tensor, and images are one."""
    tiny_processors.write_vit(tmp_path / "model")
    tiny_processors.write_images(tmp_path / "photos")
    photos = ("--calib", tmp_path / "photos", "--calib-samples", 4, "--eval", tmp_path / "photos", "--eval-samples", 4)
    plan = planned(tmp_path / "model", tmp_path / "plan.json", *photos, "--max-kl", 1e-4, "--device", "cpu")
    done = command("quantize", tmp_path / "model", "--plan", plan, *photos, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert 0 < report["allocation"]["chosen"]["kl_measured"] <= 1e-4  # on one half; the other verifies
    assert 5 < report["effective_bits"] < 9


def test_what_measures_on_one_tensor_names_the_models_that_take_several(tmp_path: Path) -> None:
    tiny_processors.write_clip(tmp_path / "model")
    tiny_processors.write_images(tmp_path / "photos")
    calib = ("--calib", tmp_path / "photos")
    for arguments in (
        ("quantize", tmp_path / "model", "--bits", 6, *calib, "--calib-samples", 2, "--out", tmp_path / "out"),
        ("sensitivity", tmp_path / "model", *calib, "--samples", 2),
    ):
        done = command(*arguments)
        assert done.exit_code == 2 and "CLIPModel takes several; quantize with --format" in done.output
    assert not (tmp_path / "out").exists()


def test_a_plan_without_weights_takes_the_same_inputs(tmp_path: Path) -> None:
    """On the meta device CLIP cannot read its attention mask; its fusion groups are found on stand-in inputs."""
    model = tiny_processors.write_clip(tmp_path / "model")
    tiny_processors.write_images(tmp_path / "photos", captions=True)
    given = ("--format", "nvfp4", "--calib", tmp_path / "photos", "--calib-samples", 2)
    done = CliRunner().invoke(main, ["quantize", *map(str, (tmp_path / "model", *given, "--dry-run", "--json"))])
    assert done.exit_code == 0, done.output
    found = quant.Plan.from_dict(json.loads(done.stdout))
    plan = quant.quantize(
        model, "nvfp4", clip_calls(tmp_path / "model", sorted((tmp_path / "photos").glob("*.png")))
    ).plan
    assert found.layers == plan.layers and "fusion_groups" not in found.provenance
    # Both towers are the model, and none is small beside a language model.
    assert {layer.reason for layer in plan.layers if layer.kind == LayerKind.LINEAR} == {"recipe nvfp4"}


@pytest.mark.parametrize(
    ("write", "files", "message"),
    [
        ("vit", "sounds", "ViTImageProcessor.* prepares no sounds"),
        ("whisper", "photos", "WhisperProcessor prepares no images"),
        ("vit", "pairs.jsonl", "no tokenizer|no usable tokenizer"),
        ("whisper", "pairs.jsonl", "WhisperForConditionalGeneration takes none of .*input_ids"),
    ],
)
def test_files_that_a_model_cannot_take_are_named(write: str, files: str, message: str, tmp_path: Path) -> None:
    KINDS[write].write(tmp_path / "model")
    name = {"sounds": "whisper", "photos": "vit", "pairs.jsonl": "t5"}[files]
    KINDS[name].files(tmp_path / files)
    done = command("quantize", tmp_path / "model", "--format", "nvfp4", "--calib", tmp_path / files,
                   "--calib-samples", 4, "--out", tmp_path / "out")  # fmt: skip
    assert done.exit_code == 2 and re.search(message, done.output), done.output
    assert done.output.splitlines()[-1].startswith("error: ") and not (tmp_path / "out").exists()


def test_a_model_without_a_processor_says_what_is_missing(tmp_path: Path) -> None:
    tiny_models.vit().save_pretrained(tmp_path / "model")
    tiny_processors.write_images(tmp_path / "photos")
    done = command("evaluate", tmp_path / "model", "--data", tmp_path / "photos", "--samples", 2)
    assert done.exit_code == 2 and "no usable processor" in done.output


def test_one_of_text_and_data(tmp_path: Path) -> None:
    for given in ((), ("--text", "a", "--data", "b")):
        done = command("evaluate", tmp_path, *given)
        assert done.exit_code == 2 and "give one of --text, --data, --task and --tasks" in done.output


@pytest.mark.parametrize("name", ["whisper", "clip"])
def test_a_data_set_is_read_as_its_files_are(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parquet file with a column of images or sounds, by `hf:`; the same plan, scales and codes come of it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    kind, model = KINDS[name], tmp_path / "model"
    (tmp_path / "set").mkdir()
    kind.write(model)
    files = kind.files(tmp_path / "files")
    what = "image" if name == "clip" else "audio"
    tiny_processors.write_parquet(files, what, tmp_path / "set" / "train.parquet")
    for out, source in (("one", tmp_path / "files"), ("two", f"hf:{tmp_path / 'set'}::train#said")):
        options = ("--format", "nvfp4", "--calib", source, "--calib-samples", 4, "--out", tmp_path / out)
        done = command("quantize", model, *options)
        assert done.exit_code == 0, done.output
    one, two = (load_file(tmp_path / out / "model.safetensors") for out in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    found = quant.Plan.load(tmp_path / "two" / "plan.json").provenance["calibration"]
    assert "through" in json.dumps(found)
