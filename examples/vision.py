"""A vision model: a ViT in FP8, calibrated on a folder of photos and compared with the original on them.

python examples/vision.py photos/ --model google/vit-base-patch16-224
"""

import argparse
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("photos", type=Path, help="a folder of PNG or JPEG files")
options.add_argument("--model", default="google/vit-base-patch16-224")
options.add_argument("--recipe", default="fp8")
options.add_argument("--out", default="out/vision")
parsed = options.parse_args()

files = [file for file in sorted(parsed.photos.iterdir()) if file.suffix.lower() in (".png", ".jpg", ".jpeg")]
processor = AutoImageProcessor.from_pretrained(parsed.model, use_fast=False)
images = [Image.open(file).convert("RGB") for file in files]
pixels = processor(images, return_tensors="pt")["pixel_values"]  # [photos, 3, height, width]
original = AutoModelForImageClassification.from_pretrained(parsed.model)

# FP8 inputs have one scale for each layer, which comes from the photos.
result = quant.quantize(AutoModelForImageClassification.from_pretrained(parsed.model), parsed.recipe, pixels)
measured = quant.evaluate(result.model, pixels, original)
print(f"same class in {measured.top1:.1%} of {len(pixels)} photos, KL {measured.kl:.5f}")
with torch.inference_mode():
    best = result.model(pixels).logits.argmax(-1).tolist()
for file, label in zip(files, best, strict=True):
    print(f"{file.name}: {original.config.id2label[label]}")
quant.save(result.model, result.plan, parsed.out, overwrite=True)
processor.save_pretrained(parsed.out)
print(f"written to {parsed.out}")
