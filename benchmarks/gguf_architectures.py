"""This benchmark runs a small random model of every architecture through a GGUF file and llama.cpp.

For each the table has the KL divergence of llama.cpp's logits from those of PyTorch, with the weights in FORMAT, or in
16 bit. llama.cpp rounds inputs to eight bits while it multiplies by quantized weights. `back` has that of the model
which `quant.open_model` reads from the file. PYTHON has the package llama-cpp-py-sync.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from _llama_cpp import Llama
from _table import machine, show, versions
from gguf_files import divergence

import quant
from quant.base.errors import UserError
from quant.export.gguf.export_gguf import write_gguf

TITLE = "Architectures in llama.cpp"
_SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64}  # fmt: skip
_WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {}, "Mistral": {"sliding_window": None}, "Mixtral": {**_EXPERTS, "sliding_window": None}, "Arcee": {},
    "SmolLM3": {}, "Qwen2": {}, "Qwen3": {}, "Qwen2Moe": _EXPERTS, "Qwen3Moe": {**_EXPERTS, "norm_topk_prob": True},
    "Granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
                "logits_scaling": 2.0},
    "Olmo2": {}, "Olmoe": {**_EXPERTS, "num_key_value_heads": 4}, "SeedOss": {}, "Ernie4_5": {}, "HunYuanDenseV1": {},
    "Exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 4}, "Glm4": {"partial_rotary_factor": 0.5},
    "Starcoder2": {}, "StableLm": {"partial_rotary_factor": 0.25}, "Phi": {"partial_rotary_factor": 0.5}, "Phi3": {},
    "Gemma": {"hidden_act": "gelu_pytorch_tanh"}, "Gemma2": {"query_pre_attn_scalar": 32, "sliding_window": 16},
    "Gemma3": {"query_pre_attn_scalar": 32, "sliding_window": 16, "num_hidden_layers": 6},
    "Cohere": {"logit_scale": 1.0},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
               "max_position_embeddings": 131072},
    "Cohere2": {**_WINDOWS, "logit_scale": 1.0},
}  # fmt: skip


@click.command(help=__doc__)
@click.argument("python", type=click.Path(path_type=Path))
@click.argument("formats", nargs=-1)
@click.option("--only", multiple=True, help="Names of model classes.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
def main(python: Path, formats: tuple[str, ...], only: tuple[str, ...], json_path: Path | None) -> None:
    llama, rows = Llama(python), list[dict[str, Any]]()
    ids = torch.randint(3, 128, (2, 48), generator=torch.Generator().manual_seed(0))
    for name in only or MODELS:
        row: dict[str, Any] = {"architecture": name}
        for format in formats or ("16bit", "mxfp4a16", "nvfp4a16"):
            model = build(name)
            if format != "16bit":
                model = quant.quantize(model, format, solver="rtn").model
            with tempfile.TemporaryDirectory() as folder, torch.no_grad():
                file = Path(folder, "model.gguf")
                try:
                    write_gguf(model, file)
                except UserError:
                    row[format] = "refused"
                    continue
                exact = model.float()(ids).logits.numpy()
                row[format] = divergence(exact, llama.logits(file, ids.numpy()))
                again: Any = quant.open_model(file, dtype="float32").model
                row[f"{format}, back"] = divergence(exact, again(ids).logits.numpy())
        rows.append(row)
        print(row, flush=True)
    show(TITLE, {**machine(1), **versions("gguf", "transformers")}, rows, json_path=json_path)


def build(name: str) -> Any:
    """A model in BF16 whose matrices keep the size of what they multiply, so that all of them matter to the result."""
    import transformers

    # Gemma multiplies embeddings by the root of their width: larger ones would outweigh all blocks in the tied head.
    embedding = 1 if name.startswith("Gemma") else 3
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config(**{**_SIZES, **MODELS[name]})).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5 * (embedding if "embed" in key else 1))
            elif "norm" in key and key.endswith("weight"):
                parameter.uniform_(0.5, 1.5).sub_(1 if name.startswith("Gemma") else 0)
            else:
                parameter.normal_(0, 0.1)
    return model.to(torch.bfloat16)


if __name__ == "__main__":
    main()
