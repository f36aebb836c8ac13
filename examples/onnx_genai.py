"""Export a quantized decoder for onnxruntime-genai, and generate with that runtime, token by token.

pip install '.[genai]'
python examples/onnx_genai.py --model MODEL --prompt "The sky is"
"""

import argparse
import subprocess
import sys

import onnxruntime_genai as og

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--model", default="smollm2-135m")
options.add_argument("--recipe", default="fp8_channel")
options.add_argument("--prompt", default="The sky is")
options.add_argument("--out", default="out/onnx_genai")
parsed = options.parse_args()

source = quant.open_model(parsed.model)
result = quant.quantize(source.model.float(), parsed.recipe, effort=1)
quant.save(result.model, result.plan, parsed.out, tokenizer=source.load_tokenizer(), overwrite=True)
command = ["export", parsed.out, "--to", "onnx", "--genai", "--out", f"{parsed.out}-genai", "--overwrite"]
subprocess.run([sys.executable, "-m", "quant", *command], check=True)

# From here on nothing is of PyTorch: the directory has the graph, genai_config.json and the tokenizer.
model = og.Model(f"{parsed.out}-genai")
tokenizer = og.Tokenizer(model)
parameters = og.GeneratorParams(model)
prompt = tokenizer.encode(parsed.prompt)
parameters.set_search_options(max_length=len(prompt) + 16)
generator = og.Generator(model, parameters)
generator.append_tokens(prompt)
stream = tokenizer.create_stream()
while not generator.is_done():
    generator.generate_next_token()
    print(stream.decode(generator.get_next_tokens()[0]), end="", flush=True)
print(f"\nwritten to {parsed.out}-genai")
