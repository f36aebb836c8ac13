"""Export a quantized decoder as one ONNX file with a KV cache, check its tokens against PyTorch, and generate with it.

python examples/onnx_engine.py --model MODEL --prompt "The sky is"
"""

import argparse
import subprocess
import sys

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--model", default="smollm2-135m")
options.add_argument("--recipe", default="int8", help="onnxruntime runs INT8, FP8 and INT4 in groups of 128")
options.add_argument("--prompt", default="The sky is")
options.add_argument("--capacity", default="512", help="tokens of the KV cache")
options.add_argument("--out", default="out/onnx_engine")
parsed = options.parse_args()

source = quant.open_model(parsed.model)
# onnxruntime has no BF16 operators on a processor, so everything that is not quantized is exported in FP32.
result = quant.quantize(source.model.float(), parsed.recipe, effort=1)
quant.save(result.model, result.plan, parsed.out, tokenizer=source.load_tokenizer(), overwrite=True)

engine = f"{parsed.out}-onnx/model.onnx"
commands = [
    ["export", parsed.out, "--to", "onnx", "--out", f"{parsed.out}-onnx", "--capacity", parsed.capacity, "--overwrite"],
    ["check", engine, "--source", parsed.out],
    ["generate", parsed.out, "--engine", engine, "--prompt", parsed.prompt, "--max-new-tokens", "16"],
]
for command in commands:
    print("quant", *command, flush=True)
    subprocess.run([sys.executable, "-m", "quant", *command], check=True)
