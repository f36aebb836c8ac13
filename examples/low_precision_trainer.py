"""Fine-tune with transformers' Trainer while all products of linear layers are rounded to MXFP8, and deploy the result.

python examples/low_precision_trainer.py mine.txt --steps 300 --out out/mxfp8
"""

import argparse

from transformers import Trainer, TrainingArguments

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("text", nargs="?", default="benchmarks/data/calibration.txt", help="a text file")
options.add_argument("--model", default="smollm2-135m")
options.add_argument("--recipe", default="mxfp8", help="such as fp8_rowwise, fp8_block or nvfp4")
options.add_argument("--steps", type=int, default=20)
options.add_argument("--out", default="out/mxfp8")
parsed = options.parse_args()

source = quant.open_model(parsed.model)
model, tokenizer = source.model.float().requires_grad_(True), source.load_tokenizer()
rows = quant.token_rows(parsed.text, tokenizer, samples=64, seqlen=128)
print(quant.to_low_precision_training(model, parsed.recipe))

arguments = TrainingArguments(
    f"{parsed.out}-steps", max_steps=parsed.steps, save_strategy="no", per_device_train_batch_size=2,
    learning_rate=2e-5, gradient_checkpointing=True, logging_steps=1, report_to=[],
)  # fmt: skip
dataset = [{"input_ids": row, "labels": row} for row in rows]
Trainer(model, arguments, train_dataset=dataset, processing_class=tokenizer).train()

print(f"perplexity in training: {quant.evaluate(model, rows[:8]).perplexity:.3f}")
plan = quant.pack(model)
for parameter in model.parameters():  # norms and embeddings trained in float32; runtimes load a model in 16 bit
    parameter.data = parameter.data.bfloat16()  # model.bfloat16() would round the frequencies of positions, too
print(f"perplexity deployed: {quant.evaluate(model, rows[:8]).perplexity:.3f}")
quant.save(model, plan, parsed.out, tokenizer=tokenizer, overwrite=True)
print(f"written to {parsed.out}")
