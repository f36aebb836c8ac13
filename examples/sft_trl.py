"""TRL's SFTTrainer trains LoRA adapters on a model in NVFP4, on a text that it tokenizes itself.

python examples/sft_trl.py [MODEL [TEXT [STEPS [OUT]]]]
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

import quant

DEFAULTS = ["smollm2-135m", "benchmarks/data/calibration.txt", "20", "out/sft"]
name, text, steps, out = [*sys.argv[1:], *DEFAULTS[len(sys.argv) - 1 :]]

source = quant.open_model(name)
tokenizer = source.load_tokenizer()
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
base = quant.quantize(source.model, "nvfp4a16")
trainer = SFTTrainer(
    base.model,
    SFTConfig(
        out,
        max_steps=int(steps),
        per_device_train_batch_size=2,
        max_length=128,
        bf16=torch.cuda.is_available(),
        report_to=[],
    ),
    train_dataset=Dataset.from_dict({"text": Path(text).read_text().split("\n\n")}),
    processing_class=tokenizer,
    peft_config=quant.lora(LoraConfig(r=8, target_modules="all-linear"), base.model),
)
trainer.train()
trainer.save_model(f"{out}/adapters")
merged = quant.merge_lora(trainer.model.eval(), quant.token_rows(text, tokenizer, samples=8, seqlen=128))
quant.save(merged.model, merged.plan, f"{out}/merged", tokenizer=tokenizer, overwrite=True)
