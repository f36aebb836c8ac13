"""Quantize a checkpoint by several processes, one for each GPU or sharing the cores, with the same bytes as by one.

python examples/several_processes.py mine.txt --model MODEL --devices 4
"""

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("text", nargs="?", default="benchmarks/data/calibration.txt", help="a text file")
options.add_argument("--model", default="smollm2-135m")
options.add_argument("--recipe", default="nvfp4a16")
options.add_argument("--devices", default="2", help="GPUs, or processes where there is none")
options.add_argument("--samples", default="8", help="rows of text for GPTQ")
options.add_argument("--seqlen", default="64", help="tokens in a row")
options.add_argument("--out", default="out/several_processes")
parsed = options.parse_args()

command = [
    sys.executable, "-m", "quant", "quantize", parsed.model, "--format", parsed.recipe, "--solver", "gptq",
    "--calib", parsed.text, "--calib-samples", parsed.samples, "--seqlen", parsed.seqlen, "--overwrite",
]  # fmt: skip
hashes = []
for devices in ("1", parsed.devices):
    directory = Path(f"{parsed.out}-{devices}")
    subprocess.run([*command, "--devices", devices, "--out", directory], check=True)
    weights = sorted(directory.glob("*.safetensors"))
    hashes.append([hashlib.sha256(file.read_bytes()).hexdigest() for file in weights])
assert hashes[0] == hashes[1], "the weights of one process and of several differ"
print(f"the weights in {parsed.out}-1 and {parsed.out}-{parsed.devices} are equal")
