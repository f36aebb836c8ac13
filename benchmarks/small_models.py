"""This benchmark quantizes BERT, ViT and ResNet from disk to disk: seconds of processes, beside ModelOpt and torchao.

    python benchmarks/small_models.py [--device cuda] [--rows 64] [--repeat 2] [--json FILE]

Models are BERT-base, ViT-base and ResNet-50 of transformers with random weights in FP32, saved before; all toolkits
read the same directory and the same prepared inputs. Each run is a process of its own that imports, loads, quantizes to
FP8 and saves; it says when each of these ended, and the best of the repetitions counts. Scales of inputs are static in
ours and in ModelOpt's FP8_DEFAULT_CFG; torchao's are dynamic and need no inputs. ModelOpt and torchao save by
`torch.save` of the state, the only way that they have for encoders; ours is a checkpoint with a report, and is
measured against the original on 8 rows, as the command does by default. Of ours, the stages of report.json are printed.

`gptq` rounds weights by second moments, which the peers do not; `rtn` is what they do.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quant.base.json_files import json_text

START = time.time()
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT-base": ("BertConfig", "BertForSequenceClassification", {}),
    "ViT-base": ("ViTConfig", "ViTForImageClassification", {"num_labels": 1000}),
    "ResNet-50": ("ResNetConfig", "ResNetForImageClassification", {"num_labels": 1000}),
}
RUNS = ("Blockscale rtn", "Blockscale gptq", "ModelOpt FP8_DEFAULT_CFG", "torchao FP8 dynamic")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=RUNS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", nargs=4, metavar=("WHAT", "MODEL", "INPUTS", "OUT"), help="one run, in this process")
    options = parser.parse_args()
    if options.run:
        run(*options.run, device=options.device)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            model, inputs = make(name, Path(folder) / name, options.rows)
            for what in options.only:
                if what.startswith("torchao") and importlib.util.find_spec("torchao") is None:
                    continue
                out = Path(folder) / f"{name} {what}"
                runs = [
                    measure(what, model, inputs, out.with_suffix(f".{turn}"), options) for turn in range(options.repeat)
                ]
                best = min(runs, key=lambda moments: moments["end"])
                rows.append({"model": name, "run": what, **best})
                print(f"{name:10} {what:26}", *(f"{key} {value:6.2f}" for key, value in best.items()), flush=True)
    if options.json:
        options.json.write_text(json_text(rows, indent=1), encoding="utf-8")


def make(name: str, directory: Path, rows: int) -> tuple[Path, Path]:
    """Saves a model with random weights and its inputs; returns where they are."""
    import torch
    import transformers
    from safetensors.torch import save_file

    config_class, model_class, fields = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**fields)
    getattr(transformers, model_class)(config).save_pretrained(directory)
    inputs = directory.with_suffix(".safetensors")
    if name.startswith("BERT"):
        tensors = {
            "input_ids": torch.randint(config.vocab_size, (rows, 128)),
            "attention_mask": torch.ones(rows, 128).long(),
        }
    else:
        tensors = {"pixel_values": torch.randn(rows, 3, 224, 224)}
    save_file(tensors, inputs)
    return directory, inputs


def measure(what: str, model: Path, inputs: Path, out: Path, options: argparse.Namespace) -> dict[str, float]:
    """Seconds after the start of a process at which it had imported, loaded, quantized and saved, and had ended."""
    started = time.time()
    if what.startswith("Blockscale"):
        command = ["-m", "quant", "quantize", str(model), "--format", "fp8", "--solver", what.split()[1], "--quiet"]
        command += ["--calib", str(inputs), "--calib-samples", str(options.rows - 8), "--device", options.device]
        command += ["--eval", str(inputs), "--eval-samples", "8", "--out", str(out)]
    else:
        command = [__file__, "--device", options.device, "--run", what, str(model), str(inputs), str(out)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=out.parent, env=os.environ)
    ended = time.time() - started
    if done.returncode:
        raise SystemExit(f"{what}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    if what.startswith("Blockscale"):
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
        return {**report["seconds"], "end": ended}
    moments: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {**{key: moment - started for key, moment in moments.items()}, "end": ended}


def run(what: str, model_path: str, inputs: str, out: str, *, device: str) -> None:
    """Quantizes a model by a peer and prints the moments of it."""
    import torch
    import transformers
    from safetensors.torch import load_file

    if what.startswith("ModelOpt"):
        import modelopt.torch.quantization as mtq
    else:
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_
    moments = {"imported": time.time()}
    _, model_class, _ = next(each for name, each in MODELS.items() if Path(model_path).name == name)
    model = getattr(transformers, model_class).from_pretrained(model_path).to(device).eval()
    moments["loaded"] = time.time()
    with torch.no_grad():
        if what.startswith("ModelOpt"):
            tensors = load_file(inputs, device=device)

            def forward(model: Any) -> None:
                count = len(next(iter(tensors.values())))
                for first in range(0, count, 16):
                    model(**{name: tensor[first : first + 16] for name, tensor in tensors.items()})

            model = mtq.quantize(model, mtq.FP8_DEFAULT_CFG, forward)
        else:
            model = model.to(torch.bfloat16)
            quantize_(model, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
    if device == "cuda":
        torch.cuda.synchronize()
    moments["quantized"] = time.time()
    torch.save(model.state_dict(), out)
    moments["saved"] = time.time()
    print(json_text(moments))


if __name__ == "__main__":
    main()
