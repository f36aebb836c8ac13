"""transformers' Trainer fine-tunes what a quantized model has in 16 bit; its checkpoints are quantized checkpoints.

python examples/trainer.py [MODEL [TEXT [STEPS [OUT]]]]
"""

import sys

from transformers import Trainer, TrainingArguments

import quant

DEFAULTS = ["smollm2-135m", "benchmarks/data/calibration.txt", "20", "out/trainer"]
name, text, steps, out = [*sys.argv[1:], *DEFAULTS[len(sys.argv) - 1 :]]

source = quant.open_model(name)
rows = quant.token_rows(text, source.load_tokenizer(), samples=16, seqlen=128)
model = quant.quantize(source.model, "nvfp4a16", rows).model
for parameter_name, parameter in model.named_parameters():
    parameter.requires_grad_("norm" in parameter_name)

arguments = TrainingArguments(
    out, max_steps=int(steps), save_steps=int(steps), per_device_train_batch_size=2, learning_rate=1e-3,
    gradient_checkpointing=True, logging_steps=1, report_to=[],
)  # fmt: skip
dataset = [{"input_ids": row, "labels": row} for row in rows]
Trainer(model, arguments, train_dataset=dataset).train()

saved = quant.load(f"{out}/checkpoint-{steps}")
print("perplexity of the checkpoint:", quant.evaluate(saved, rows).perplexity)
