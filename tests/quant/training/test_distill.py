"""The loss of distillation and its gradients are those of autograd in float64, whatever the slices."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from children import run_ranks
from second_device import second_device
from slow_cases import quick_cases
from torch import nn
from torch.nn import functional
from torch.nn.functional import log_softmax

import quant
from quant.training import distillation_loss
from quant.training.distillation_loss import CachedTeacher, LogitTeacher, TopTeacher, cache_teacher, chunked_kl

ROWS = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(7))
POSITIONS, HIDDEN, VOCABULARY, K = 23, 16, 50, 7


class Case:
    """Hidden states and heads of a student and a teacher, and weights of positions."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(POSITIONS, HIDDEN).requires_grad_()
        self.head, self.teacher_head = nn.Linear(HIDDEN, VOCABULARY), nn.Linear(HIDDEN, VOCABULARY)
        self.teacher_head.requires_grad_(False).weight *= 4
        self.taught = torch.randn(POSITIONS, HIDDEN)
        self.mask = torch.rand(POSITIONS) > 0.3

    def exact(self, temperature: float, mask: torch.Tensor, k: int | None) -> list[torch.Tensor]:
        """Loss and gradients of hidden states, weight and bias by autograd in float64."""
        hidden = self.hidden.detach().double().requires_grad_()
        head = copy.deepcopy(self.head).double()
        logq = log_softmax(head(hidden) / temperature, -1)
        logp = log_softmax(copy.deepcopy(self.teacher_head).double()(self.taught.double()) / temperature, -1)
        if k is not None:
            top, tokens = logp.topk(k)
            others = torch.ones_like(logq).scatter(-1, tokens, 0)
            logp = torch.cat([top, (logp.exp() * others).sum(-1, keepdim=True).log()], -1)
            logq = torch.cat([logq.gather(-1, tokens), (logq.exp() * others).sum(-1, keepdim=True).log()], -1)
        loss = (logp.exp() * (logp - logq)).sum(-1)[mask].mean() * temperature**2
        return [loss, *torch.autograd.grad(loss, [hidden, head.weight, head.bias])]


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("k", [None, K], ids=["all", "top"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("positions", [4, 1 << 20])
def test_loss_and_gradients(
    temperature: float, k: int | None, masked: bool, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(distillation_loss._SLICE_ELEMENTS, "cpu", positions * VOCABULARY)
    case = Case()
    teacher: Any = LogitTeacher(case.taught, case.teacher_head)
    if k is not None:
        logp = log_softmax(case.teacher_head(case.taught) / temperature, -1)
        teacher = TopTeacher(logp.topk(k).indices.int(), logp.topk(k).values, "teacher", VOCABULARY)
    mask = case.mask if masked else torch.ones(POSITIONS, dtype=torch.bool)
    loss = chunked_kl(case.hidden, case.head, teacher, temperature=temperature, mask=case.mask if masked else None)
    (3 * loss).backward()
    exact, *gradients = case.exact(temperature, mask, k)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    for parameter, gradient in zip((case.hidden, case.head.weight, case.head.bias), gradients, strict=True):
        assert parameter.grad is not None
        assert float((parameter.grad / 3 - gradient).norm() / gradient.norm()) < 2e-6


@pytest.mark.parametrize(
    ("positions", "dtype"),
    quick_cases(
        product((1000, 1 << 20), (torch.float16, torch.bfloat16)),
        lambda positions, dtype: (positions == 1000) == (dtype is torch.bfloat16),
    ),
)
def test_gradients_of_many_positions_do_not_underflow(
    dtype: torch.dtype, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient of 8,192 positions over 2,000 tokens is 2e-8 an element, and FP16 has nothing below 6e-8."""
    tokens = 2000
    monkeypatch.setitem(distillation_loss._SLICE_ELEMENTS, "cpu", positions * tokens)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(8192, HIDDEN, generator=generator).requires_grad_()
    head, teacher_head = nn.Linear(HIDDEN, tokens), nn.Linear(HIDDEN, tokens).requires_grad_(False)
    with torch.no_grad():
        for each, seed in ((head, 1), (teacher_head, 2)):
            each.weight.normal_(0, 0.1, generator=generator.manual_seed(seed))
    with torch.autocast("cpu", dtype):
        loss = chunked_kl(hidden, head, LogitTeacher(hidden.detach(), teacher_head))
    loss.backward()
    exact = copy.deepcopy(head).double()
    x = hidden.detach().double().requires_grad_()
    logq, logp = log_softmax(exact(x), -1), log_softmax(copy.deepcopy(teacher_head).double()(x.detach()), -1)
    (logp.exp() * (logp - logq)).sum(-1).mean().backward()
    for one, other in ((hidden, x), (head.weight, exact.weight), (head.bias, exact.bias)):
        assert one.grad is not None and other.grad is not None
        apart = float((one.grad - other.grad).norm() / other.grad.norm())
        assert apart < 8 * torch.finfo(dtype).eps, apart


def test_sums_over_slices_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters in BF16 get the gradient of 512 slices, which adds up in FP32."""
    tokens = 50
    monkeypatch.setitem(distillation_loss._SLICE_ELEMENTS, "cpu", 4 * tokens)
    torch.manual_seed(0)
    hidden = torch.randn(2048, HIDDEN).bfloat16()
    head, teacher_head = nn.Linear(HIDDEN, tokens).bfloat16(), nn.Linear(HIDDEN, tokens).bfloat16()
    teacher = LogitTeacher(hidden, teacher_head.requires_grad_(False))
    (chunked_kl(hidden, head, teacher) / 3).backward()
    exact = copy.deepcopy(head).double()
    with torch.no_grad():
        p = teacher_head(hidden).double().softmax(-1)
    logq = log_softmax(exact(hidden.double()), -1)
    (-(p * logq).sum(-1).mean() / 3).backward()
    for one, other in zip(head.parameters(), exact.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and one.grad.dtype is torch.bfloat16
        assert float((one.grad.double() - other.grad).norm() / other.grad.norm()) < torch.finfo(torch.bfloat16).eps


def test_no_more_logits_are_kept_than_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(distillation_loss._SLICE_ELEMENTS, "cpu", 5 * VOCABULARY)
    case, seen = Case(), []
    head = copy.copy(case.head)
    head.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))

    teacher = LogitTeacher(case.taught, case.teacher_head)
    loss = chunked_kl(case.hidden, head, teacher)
    assert max(seen) == 5 and sum(seen) == POSITIONS + 1
    saved = [tensor.shape for tensor in loss.grad_fn.saved_tensors]  # type: ignore[union-attr]
    assert saved == [case.hidden.shape, case.head.weight.shape, case.head.bias.shape]


def full_loss(student: Any, teacher: Any, temperature: float = 1.0, counted: torch.Tensor | None = None) -> Any:
    """The KL in float64 from the logits of whole models, by autograd."""
    with torch.no_grad():
        logp = log_softmax(teacher(ROWS).logits.double() / temperature, -1)
    logq = log_softmax(student(ROWS).logits.double() / temperature, -1)
    each = (logp.exp() * (logp - logq)).sum(-1) * temperature**2
    return each.mean() if counted is None else each[counted].mean()


def granite(**options: Any) -> Any:
    return tiny_models.build("Granite", "ForCausalLM", {**tiny_models.DECODER, "logits_scaling": 5.0}, **options)


def cohere(**options: Any) -> Any:
    return tiny_models.build("Cohere", "ForCausalLM", {**tiny_models.DECODER, "logit_scale": 0.3}, **options)


def recurrent_gemma(**options: Any) -> Any:
    sizes = {**tiny_models.DECODER, "logits_soft_cap": 2.0, "block_types": ["recurrent", "attention"]}
    return tiny_models.build("RecurrentGemma", "ForCausalLM", sizes, **options)


def gemma2(**options: Any) -> Any:
    return tiny_models.gemma2(final_logit_softcapping=2.0, **options)


def ruling_out(**options: Any) -> Any:
    """A llama that makes a token unlikely after its head, as Chameleon does with those of images; no config tells."""
    model = tiny_models.llama(**options)
    bias = torch.zeros(64).index_fill(0, torch.tensor([3, 9]), -20.0)

    def rule_out(module: Any, args: Any, result: Any) -> Any:
        result.logits = result.logits + bias.to(result.logits.dtype)
        return result

    model.register_forward_hook(rule_out)
    return model


FAMILIES = [tiny_models.llama, gemma2, granite, cohere, recurrent_gemma, ruling_out]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("build", FAMILIES, ids=lambda build: build.__name__)
def test_distill_of_models_is_the_loss_of_their_logits(build: Any, dtype: torch.dtype) -> None:
    """Gemma caps its logits, Granite divides them, Cohere multiplies them; the first two tie heads to embeddings."""
    student, teacher = build(gain=2.0, dtype=dtype).requires_grad_(True), build(seed=1, gain=2.0, dtype=dtype)
    twin = copy.deepcopy(student)
    narrow = dtype is torch.bfloat16
    expected = full_loss(twin if narrow else twin.double(), teacher if narrow else copy.deepcopy(teacher).double(), 2.0)
    for _ in range(2):  # the first run finds out what follows the head
        student.zero_grad()
        loss = quant.distill(student, teacher, ROWS, temperature=2.0)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-2 if narrow else 1e-5)
        loss.backward()
    expected.backward()
    for (name, one), other in zip(student.named_parameters(), twin.parameters(), strict=True):
        apart = (one.grad.double() - other.grad.double()).norm() / other.grad.double().norm().clamp(min=1e-12)
        assert float(apart) < (5e-2 if narrow else 1e-4), name


@pytest.mark.parametrize("build", FAMILIES, ids=lambda build: build.__name__)
def test_a_teacher_has_nothing_to_learn_from_its_own_cache(build: Any, tmp_path: Path) -> None:
    teacher = build(gain=2.0).requires_grad_(True)
    cache_teacher(teacher, ROWS, tmp_path / "teacher", k=8)
    loss = quant.distill(teacher, tmp_path / "teacher", ROWS)
    assert abs(loss.item()) < 1e-6
    loss.backward()
    assert all(float(p.grad.abs().max()) < 1e-5 for p in teacher.parameters() if p.grad is not None)


@pytest.mark.parametrize("build", FAMILIES, ids=lambda build: build.__name__)
def test_no_logits_of_whole_rows_are_computed(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """But of a model that does after its head what its config does not name."""
    monkeypatch.setitem(distillation_loss._SLICE_ELEMENTS, "cpu", 9 * 64)
    student, teacher = build(gain=2.0).requires_grad_(True), build(seed=1, gain=2.0)
    seen: list[int] = []
    plain = student.lm_head.forward

    def counted(x: torch.Tensor) -> torch.Tensor:
        seen.append(x[..., 0].numel())
        return plain(x)  # type: ignore[no-any-return]

    student.lm_head.forward = counted
    quant.distill(student, teacher, ROWS)
    quant.distill(student, teacher, ROWS)
    assert student.lm_head.forward is counted
    assert max(seen) == (ROWS.numel() if build is ruling_out else 9)


def test_masks_and_labels_choose_positions() -> None:
    student, teacher = tiny_models.llama(gain=2.0), tiny_models.llama(seed=1, gain=2.0)
    labels = ROWS.clone()
    labels[:, :10] = -100
    counted = torch.zeros_like(ROWS, dtype=torch.bool)
    counted[:, 9:-1] = True
    found = quant.distill(student, teacher, {"input_ids": ROWS, "labels": labels})
    assert found.item() == pytest.approx(full_loss(student, teacher, counted=counted).item(), rel=1e-5)


def test_what_does_not_count_may_be_anything() -> None:
    """NaN in a position that a mask leaves out changes neither the loss nor a gradient; weights are of any size."""
    case = Case()
    teacher = LogitTeacher(case.taught, case.teacher_head)
    hidden = case.hidden.detach().clone()
    hidden[~case.mask] = torch.nan
    hidden.requires_grad_()
    expected = case.exact(1.0, case.mask, None)
    for factor in (1.0, 0.01):
        loss = chunked_kl(hidden, case.head, teacher, mask=case.mask * factor)
        (gradient,) = torch.autograd.grad(loss, hidden)
        assert loss.item() == pytest.approx(expected[0].item(), rel=1e-5)
        torch.testing.assert_close(gradient.double(), expected[1], rtol=1e-4, atol=1e-7)
    assert chunked_kl(hidden, case.head, teacher, mask=torch.zeros_like(case.mask)).item() == 0


def padded(on_the_left: bool) -> dict[str, torch.Tensor]:
    mask = torch.ones_like(ROWS)
    mask[:2, slice(0, 8) if on_the_left else slice(-8, None)] = 0
    return {"input_ids": ROWS, "attention_mask": mask}


def test_data_parallel_gives_its_model_all_inputs() -> None:
    student, teacher = tiny_models.llama(gain=2.0), tiny_models.llama(seed=1, gain=2.0)
    batch = padded(on_the_left=True)
    expected = quant.distill(student, teacher, batch, hidden=0.5)
    assert quant.distill(nn.DataParallel(student), teacher, batch, hidden=0.5).item() == pytest.approx(expected.item())


def test_a_cached_teacher_reads_no_padding(tmp_path: Path) -> None:
    model = tiny_models.llama(gain=2.0)
    cache_teacher(model, ROWS, tmp_path / "teacher", k=64)
    assert abs(quant.distill(model, tmp_path / "teacher", padded(on_the_left=False)).item()) < 1e-6
    with pytest.raises(
        quant.UserError, match="rows are padded on the left, and a cached teacher has read their padding"
    ):
        quant.distill(model, tmp_path / "teacher", padded(on_the_left=True))


def test_each_module_keeps_its_mode(tmp_path: Path) -> None:
    student, teacher = tiny_models.llama(), tiny_models.llama(seed=1).train()
    teacher.model.layers[0].eval()
    modes = [module.training for module in teacher.modules()]
    quant.distill(student, teacher, ROWS)
    cache_teacher(teacher, ROWS, tmp_path / "teacher", k=4)
    assert [module.training for module in teacher.modules()] == modes and len(set(modes)) == 2


def test_models_that_are_no_causal_language_models_are_refused() -> None:
    model = tiny_models.t5()
    with pytest.raises(
        quant.UserError, match="T5ForConditionalGeneration: an encoder-decoder; distillation is for causal"
    ):
        quant.distill(model, copy.deepcopy(model), {"input_ids": ROWS, "decoder_input_ids": ROWS})
    model = tiny_models.bert_classifier()
    with pytest.raises(
        quant.UserError, match=r"gives outputs \[4, \d+\] for token ids \[4, 24\]; distillation is for caus"
    ):
        quant.distill(model, copy.deepcopy(model), ROWS)


def test_a_cached_teacher_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    cache_teacher(tiny_models.llama(vocab_size=80), ROWS, tmp_path / "teacher", k=4)
    with pytest.raises(
        quant.UserError, match="knows 80 tokens and the student's vocabulary has 64; cache a teacher of the"
    ):
        quant.distill(tiny_models.llama(), tmp_path / "teacher", ROWS)


def test_refusals_of_distill() -> None:
    student, teacher = tiny_models.llama(), tiny_models.llama(seed=1)
    with pytest.raises(quant.UserError, match="the teacher is the student itself"):
        quant.distill(student, student, ROWS)
    with pytest.raises(quant.UserError, match="teacher is None; expected a model, or a file"):
        quant.distill(student, None, ROWS)  # type: ignore[arg-type]
    with pytest.raises(quant.UserError, match="the batch is None; expected token ids"):
        quant.distill(student, teacher, None)  # type: ignore[arg-type]
    with pytest.raises(quant.UserError, match=r"token ids \[24\]; expected \[rows, seqlen\]"):
        quant.distill(student, teacher, ROWS[0])
    with pytest.raises(quant.UserError, match=r"hidden is -1; expected a weight of at least 0"):
        quant.distill(student, teacher, ROWS, hidden=-1)
    encoder = tiny_models.bert()
    with pytest.raises(quant.UserError, match="the model gives no logits; distillation is for language models"):
        quant.distill(encoder, teacher, ROWS)
    with pytest.raises(quant.UserError, match="compute_metrics: distillation keeps no logits of whole rows"):
        quant.DistillTrainer(model=student, teacher=teacher, compute_metrics=lambda found: {})


def test_hidden_states_of_a_merged_rotation_are_refused() -> None:
    teacher = tiny_models.llama(gain=2.0)
    student = copy.deepcopy(teacher).requires_grad_(True)
    quant.prepare_qat(student, "nvfp4a16", ROWS, solver="rotation:merge")
    assert quant.distill(student, teacher, ROWS).item() > 0
    told = "rotation:merge rotated the student's hidden states, and the teacher's are as they were"
    with pytest.raises(quant.UserError, match=told):
        quant.distill(student, teacher, ROWS, hidden=1.0)
    quant.pack(student)
    with pytest.raises(quant.UserError, match=told):
        quant.distill(student, teacher, ROWS, hidden=1.0)


def on_a_second_device(_: int) -> None:
    """A model's last part is there, and its inputs and their mask are where its first part is."""
    device = second_device()
    hidden, taught = torch.randn(6, 8), torch.randn(6, 8)
    head, mask = nn.Linear(8, 32), torch.tensor([1, 1, 0, 1, 1, 0]).bool()
    expected = chunked_kl(hidden, head, LogitTeacher(taught, copy.deepcopy(head)), mask=mask).item()
    there = copy.deepcopy(head).to(device)
    found = chunked_kl(hidden.to(device), there, LogitTeacher(taught.to(device), copy.deepcopy(there)), mask=mask)
    assert found.device == device and abs(found.cpu().item() - expected) < 1e-6


def test_a_mask_follows_to_another_device() -> None:
    run_ranks(on_a_second_device)


@pytest.mark.parametrize("masked", [False, True])
def test_hidden_states_add_their_distance(masked: bool) -> None:
    student, teacher = tiny_models.llama(gain=2.0), tiny_models.llama(seed=1, gain=2.0)
    mask = torch.ones_like(ROWS)
    if masked:
        mask[0, -7:], mask[2, -2:] = 0, 0
    batch = {"input_ids": ROWS, "attention_mask": mask}
    found = quant.distill(student, teacher, batch, hidden=0.5) - quant.distill(student, teacher, batch)
    with torch.no_grad():
        states = [model(**batch, output_hidden_states=True).hidden_states[1:] for model in (student, teacher)]
    apart = []
    for ours, theirs in zip(*states, strict=True):
        a, b = ours.double()[mask.bool()], theirs.double()[mask.bool()]
        apart.append(float(((a - b).square().sum(1) / b.square().sum(1)).mean()))
    assert found.item() == pytest.approx(0.5 * sum(apart) / len(apart), rel=1e-4)


def test_a_cached_teacher_says_what_the_model_says(tmp_path: Path) -> None:
    student, teacher = tiny_models.llama(gain=2.0), tiny_models.llama(seed=1, gain=2.0)
    cache_teacher(teacher, ROWS, tmp_path / "teacher", k=64, temperature=1.5)
    shuffled = ROWS[[2, 0]]
    found = quant.distill(student, tmp_path / "teacher", shuffled, temperature=1.5)
    torch.testing.assert_close(found, quant.distill(student, teacher, shuffled, temperature=1.5), rtol=1e-5, atol=1e-7)
    cache_teacher(teacher, ROWS, tmp_path / "few", k=4)
    few = CachedTeacher.open(tmp_path / "few")
    assert 0 < quant.distill(student, few, ROWS).item() < quant.distill(student, teacher, ROWS).item()


def test_a_teacher_may_be_quantized() -> None:
    student, teacher = tiny_models.llama(gain=2.0), tiny_models.llama(gain=2.0)
    quantized = quant.quantize(copy.deepcopy(teacher), "fp8_channel").model
    found = quant.distill(student, quantized, ROWS)
    assert found.item() == pytest.approx(full_loss(student, quantized).item(), rel=1e-4, abs=1e-7)
    assert found.item() > 0


def test_distillation_brings_a_quantized_model_nearer_to_its_teacher() -> None:
    teacher = tiny_models.llama(gain=2.0)
    student = copy.deepcopy(teacher).requires_grad_(True)
    quant.prepare_qat(student, "nvfp4a16")
    before = quant.distill(student, teacher, ROWS).item()
    optimizer = torch.optim.Adam([p for p in student.parameters() if p.requires_grad], 3e-4)
    for _ in range(20):
        optimizer.zero_grad()
        quant.distill(student, teacher, ROWS).backward()
        optimizer.step()
    quant.pack(student)
    assert quant.distill(student, teacher, ROWS).item() < 0.5 * before


def test_refusals(tmp_path: Path) -> None:
    student, other = tiny_models.llama(), tiny_models.llama(vocab_size=80)
    with pytest.raises(quant.UserError, match=r"the teacher's vocabulary has 80 tokens and the student's 64; take a"):
        quant.distill(student, other, ROWS)
    with pytest.raises(quant.UserError, match="temperature is 0; expected a number above 0"):
        quant.distill(student, copy.deepcopy(student), ROWS, temperature=0)
    with pytest.raises(quant.UserError, match=r"the student has 2 layers of 64, the teacher 1 of 64; pass hidden=0"):
        quant.distill(student, tiny_models.llama(num_hidden_layers=1), ROWS, hidden=1.0)
    with pytest.raises(quant.UserError, match=r"the batch has no input_ids \(pixel_values\)"):
        quant.distill(student, other, {"pixel_values": ROWS})
    cache_teacher(student, ROWS, tmp_path / "teacher", k=4)
    with pytest.raises(quant.UserError, match=r"cached at temperature 1, and 2 is requested"):
        quant.distill(student, tmp_path / "teacher", ROWS, temperature=2)
    with pytest.raises(quant.UserError, match=r"row 1 of the batch is not among the 4 rows that the teacher has read"):
        quant.distill(student, tmp_path / "teacher", torch.stack([ROWS[0], ROWS[0] + 1 - 2 * (ROWS[0] > 9)]))
    with pytest.raises(quant.UserError, match=r"cached teacher has no hidden states"):
        quant.distill(student, tmp_path / "teacher", ROWS, hidden=1.0)
    with pytest.raises(quant.UserError, match=r"k is 65; expected 1 to 64"):
        cache_teacher(student, ROWS, tmp_path / "large", k=65)
    with pytest.raises(quant.UserError, match=r"a directory, and no file of cache_teacher; pass its model: open"):
        quant.distill(student, tmp_path, ROWS)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(quant.UserError, match=r"cannot be read as a cached teacher"):
        quant.distill(student, tmp_path / "text", ROWS)


def test_a_cached_teacher_may_rule_tokens_out() -> None:
    """Its likeliest tokens then hold all probability, and some that have none."""
    case = Case()
    logits = torch.randn(POSITIONS, VOCABULARY).masked_fill(torch.arange(VOCABULARY) >= K - 2, -torch.inf)
    logp, tokens = logits.log_softmax(-1).topk(K)
    loss = chunked_kl(case.hidden, case.head, TopTeacher(tokens.int(), logp, "teacher", VOCABULARY))
    allowed = logits[:, : K - 2].double().log_softmax(-1)
    logq = log_softmax(case.head(case.hidden).double(), -1)[:, : K - 2]
    assert loss.item() == pytest.approx((allowed.exp() * (allowed - logq)).sum(-1).mean().item(), rel=1e-5)


def test_a_trainer_distills(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra hf")
    teacher = tiny_models.llama(gain=2.0)
    student = copy.deepcopy(teacher).requires_grad_(True)
    quant.prepare_qat(student, "nvfp4a16")
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=6, per_device_train_batch_size=1, gradient_accumulation_steps=2, learning_rate=1e-4,
        logging_steps=1, report_to=[], use_cpu=True, save_strategy="steps", save_steps=4, disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": row} for row in ROWS]
    trainer = quant.DistillTrainer(
        model=student, teacher=teacher, args=arguments, train_dataset=data, eval_dataset=data
    )
    before = trainer.evaluate()["eval_loss"]
    assert before == pytest.approx(quant.distill(student, teacher, ROWS).item(), rel=1e-4)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    resumed = copy.deepcopy(teacher).requires_grad_(True)
    quant.prepare_qat(resumed, "nvfp4a16")
    again = quant.DistillTrainer(model=resumed, teacher=teacher, args=arguments, train_dataset=data)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    for one, other in zip(student.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("packing", [False, True])
def test_sft_of_trl_distills(packing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches have labels that leave padding and prompts out, or rows packed into one, with positions."""
    trl = pytest.importorskip("trl", reason="TRL")
    from datasets import Dataset
    from tiny_processors import _byte_tokenizer

    from quant.training.trainer import DistillMixin

    class Distillation(DistillMixin, trl.SFTTrainer):  # type: ignore[misc]
        pass

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tokenizer = _byte_tokenizer(["<pad>", "</s>"], "$A </s>")
    tokenizer.pad_token, tokenizer.eos_token = "<pad>", "</s>"
    teacher = tiny_models.llama(vocab_size=len(tokenizer), num_hidden_layers=1, gain=2.0, max_position_embeddings=128)
    student = copy.deepcopy(teacher).requires_grad_(True)
    quant.prepare_qat(student, "nvfp4a16")
    data = Dataset.from_list([{"prompt": f"row {i}", "completion": " and on" * (i % 3 + 1)} for i in range(8)])
    arguments = trl.SFTConfig(
        str(tmp_path), max_steps=4, per_device_train_batch_size=2, max_length=32, packing=packing, learning_rate=1e-4,
        logging_steps=1, report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Distillation(
        student, arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer, teacher=teacher
    )
    batch = next(iter(trainer.get_eval_dataloader()))
    counted = batch["labels"][:, 1:] != -100
    assert 0 < int(counted.sum()) < counted.numel() and ("position_ids" in batch) == packing
    given = {**{name: value for name, value in batch.items() if name != "labels"}, "use_cache": False}
    with torch.no_grad():
        theirs, ours = (model(**given).logits[:, :-1][counted] for model in (teacher, student))
        expected = functional.kl_div(
            ours.double().log_softmax(-1), theirs.double().log_softmax(-1), log_target=True, reduction="batchmean"
        )
        assert trainer.compute_loss(student, batch).item() == pytest.approx(expected.item(), rel=1e-4)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
