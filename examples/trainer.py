"""transformers' Trainer fine-tunes what a quantized model has in 16 bit; its checkpoints are quantized checkpoints.

python examples/trainer.py mine.txt --steps 200 --out out/trainer
"""

import argparse

from transformers import Trainer, TrainingArguments

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("text", nargs="?", default="benchmarks/data/calibration.txt", help="a text file")
options.add_argument("--model", default="smollm2-135m")
options.add_argument("--steps", type=int, default=20)
options.add_argument("--out", default="out/trainer")
parsed = options.parse_args()

source = quant.open_model(parsed.model)
tokenizer = source.load_tokenizer()
rows = quant.token_rows(parsed.text, tokenizer, samples=16, seqlen=128)
model = quant.quantize(source.model, "nvfp4a16", effort=1).model  # 2 is GPTQ, which takes minutes on a CPU
print("perplexity before:", quant.evaluate(model, rows).perplexity)
for name, parameter in model.named_parameters():
    parameter.requires_grad_("norm" in name)

arguments = TrainingArguments(
    parsed.out, max_steps=parsed.steps, save_steps=parsed.steps, per_device_train_batch_size=2, learning_rate=1e-3,
    gradient_checkpointing=True, logging_steps=1, report_to=[],
)  # fmt: skip
dataset = [{"input_ids": row, "labels": row} for row in rows]
Trainer(model, arguments, train_dataset=dataset, processing_class=tokenizer).train()

checkpoint = f"{parsed.out}/checkpoint-{parsed.steps}"
print(f"perplexity of {checkpoint}:", quant.evaluate(quant.load(checkpoint), rows).perplexity)
