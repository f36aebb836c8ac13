"""TRL's SFTTrainer trains LoRA adapters on a model in NVFP4, on a text that it tokenizes itself.

pip install trl
python examples/sft_trl.py mine.txt --steps 200 --out out/sft
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("text", nargs="?", default="benchmarks/data/calibration.txt", help="a text file")
options.add_argument("--model", default="smollm2-135m")
options.add_argument("--steps", type=int, default=20)
options.add_argument("--out", default="out/sft")
parsed = options.parse_args()

source = quant.open_model(parsed.model)
tokenizer = source.load_tokenizer()
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
base = quant.quantize(source.model, "nvfp4a16", effort=1)  # 2 is GPTQ, which takes minutes on a CPU
arguments = SFTConfig(
    parsed.out, max_steps=parsed.steps, per_device_train_batch_size=2, max_length=128, logging_steps=1,
    learning_rate=2e-4, bf16=torch.cuda.is_available(), report_to=[],
)  # fmt: skip
paragraphs = Dataset.from_dict({"text": Path(parsed.text).read_text().split("\n\n")})
trainer = SFTTrainer(
    base.model, arguments, train_dataset=paragraphs, processing_class=tokenizer,
    peft_config=quant.lora(LoraConfig(r=8, target_modules="all-linear"), base.model),
)  # fmt: skip
trainer.train()
trainer.save_model(f"{parsed.out}/adapters")
merged = quant.merge_lora(trainer.model.eval())
quant.save(merged.model, merged.plan, f"{parsed.out}/merged", tokenizer=tokenizer, overwrite=True)
print(f"adapters are in {parsed.out}/adapters, the merged model in {parsed.out}/merged")
