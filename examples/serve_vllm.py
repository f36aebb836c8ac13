"""Write a checkpoint for vLLM, check its config with the library that vLLM reads it by, and serve it where vLLM is.

python examples/serve_vllm.py --model MODEL --out out/served
"""

import argparse
import json
import shutil
import subprocess
from pathlib import Path

from compressed_tensors.quantization import QuantizationConfig

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--model", default="smollm2-135m")
options.add_argument("--recipe", default="nvfp4a16")
options.add_argument("--out", default="out/serve_vllm")
parsed = options.parse_args()

source = quant.open_model(parsed.model)
result = quant.quantize(source.model, parsed.recipe, effort=1)
quant.save(result.model, result.plan, parsed.out, tokenizer=source.load_tokenizer(), overwrite=True)

# vLLM chooses the kernel of each layer by the groups of this config: their targets, and the bits of weights and inputs.
stored = json.loads((Path(parsed.out) / "config.json").read_text())["quantization_config"]
config = QuantizationConfig.model_validate(stored)
for name, group in config.config_groups.items():
    inputs = group.input_activations.num_bits if group.input_activations else 16
    print(f"{name}: {len(group.targets)} targets, weights in {group.weights.num_bits} bits, inputs in {inputs} bits")
print("layers in 16 bit:", ", ".join(config.ignore))

command = ["vllm", "serve", parsed.out]
print("serve it by:", *command)
if shutil.which("vllm"):
    subprocess.run(command, check=True)
