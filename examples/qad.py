"""Distillation: bring a model in NVFP4 nearer to its 16-bit original with a Trainer of transformers.

    python examples/qad.py text.txt --steps 300 --out out/qad

The text needs no labels: the student learns what the original says at each position.
"""

import argparse

import torch
import transformers

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("text", nargs="?", default="benchmarks/data/calibration.txt", help="a text file")
options.add_argument("--model", default="smollm2-135m")
options.add_argument("--steps", type=int, default=20, help="20 are a look; training takes a few hundred")
options.add_argument("--seqlen", type=int, default=256)
options.add_argument("--out", default="out/qad")
parsed = options.parse_args()

teacher = quant.open_model(parsed.model)
student, tokenizer = quant.open_model(parsed.model).model.requires_grad_(True), teacher.load_tokenizer()
rows = quant.calibration_rows(parsed.text, tokenizer, samples=64, seqlen=parsed.seqlen)

print("quantizing by GPTQ, which takes minutes on a CPU")
quant.prepare_qat(student, "nvfp4", rows[:8], solver="gptq")
size = float(teacher.model.model.layers[0].mlp.up_proj.weight.std())  # AdamW moves each weight by about the rate a step
arguments = transformers.TrainingArguments(
    f"{parsed.out}-trainer", max_steps=parsed.steps, per_device_train_batch_size=2, learning_rate=1.5e-4 * size,
    lr_scheduler_type="cosine", logging_steps=1, save_strategy="no", report_to=[], bf16=torch.cuda.is_available(),
)  # fmt: skip
trainer = quant.DistillTrainer(
    model=student, teacher=teacher.model, args=arguments, train_dataset=[{"input_ids": row} for row in rows]
)
trainer.train()

plan = quant.pack(student)
quant.save(student.cpu(), plan, parsed.out, tokenizer=tokenizer, overwrite=True)
print(f"written to {parsed.out}")
