"""A small GLM-4-MoE is trained here on bytes, with a head that predicts the token after next (MTP).

    hidden state of token t, normed ─┐
                                     ├─ eh_proj ─ block ─ norm ─ head ─▶ token t + 2
    embedding of token t + 1, normed ┘

transformers does not run such heads, and vLLM drafts with them. The files are those of GLM-4.5: the head is one block
more than the config counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.base.json_files import json_text

LAYERS = 4
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 128,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "tie_word_embeddings": False, "use_qk_norm": True,
}  # fmt: skip


class Head(nn.Module):
    """The head, with the names of its tensors in a checkpoint."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm

        config = model.config
        self.enorm, self.hnorm = (Glm4MoeRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = Glm4MoeDecoderLayer(config, LAYERS)
        self.block.apply(model._init_weights)
        self.shared_head = nn.ModuleDict({"norm": Glm4MoeRMSNorm(config.hidden_size, config.rms_norm_eps)})

    def forward(self, model: Any, rows: torch.Tensor) -> torch.Tensor:
        """Returns logits of token t + 2 for each token t but the last, `[rows, length - 1, vocabulary]`."""
        with torch.no_grad():
            hidden = model.model(rows).last_hidden_state[:, :-1]
            following = model.get_input_embeddings()(rows[:, 1:])
        # As vLLM has it: the first position has no embedding.
        following = following.index_fill(1, torch.zeros(1, dtype=torch.long, device=rows.device), 0)
        joined = self.eh_proj(torch.cat((self.enorm(following), self.hnorm(hidden)), -1))
        positions = torch.arange(joined.shape[1], device=rows.device)[None]
        embeddings = model.model.rotary_emb(joined, positions)
        return model.lm_head(self.shared_head["norm"](self.block(joined, position_embeddings=embeddings)))

    def tensors(self, model: Any) -> dict[str, torch.Tensor]:
        """Returns the tensors of the head as files of GLM-4.5 name them, expert by expert."""
        prefix, stored = f"model.layers.{LAYERS}", {}
        for name, tensor in self.state_dict().items():
            name = name.removeprefix("block.")
            if name.endswith("experts.gate_up_proj"):
                for index, expert in enumerate(tensor):
                    for projection, part in zip(("gate", "up"), expert.chunk(2), strict=True):
                        stored[f"{prefix}.mlp.experts.{index}.{projection}_proj.weight"] = part
            elif name.endswith("experts.down_proj"):
                for index, expert in enumerate(tensor):
                    stored[f"{prefix}.mlp.experts.{index}.down_proj.weight"] = expert
            else:
                stored[f"{prefix}.{name}"] = tensor
        stored[f"{prefix}.embed_tokens.weight"] = model.get_input_embeddings().weight
        stored[f"{prefix}.shared_head.head.weight"] = model.lm_head.weight
        return {name: tensor.detach().to("cpu", torch.bfloat16).clone() for name, tensor in stored.items()}

    def fill(self, stored: dict[str, torch.Tensor]) -> None:
        """Takes the tensors of a checkpoint, as `tensors` names them."""
        prefix, found = f"model.layers.{LAYERS}", {}
        for name, tensor in self.state_dict().items():
            place = f"{prefix}.{name.removeprefix('block.')}"
            if "mlp.experts." in name:
                experts = place.rpartition(".")[0]
                parts = ("gate", "up") if name.endswith("gate_up_proj") else ("down",)
                each = [[stored[f"{experts}.{i}.{part}_proj.weight"] for part in parts] for i in range(len(tensor))]
                found[name] = torch.stack([torch.cat(expert) for expert in each])
            else:
                found[name] = stored[place]
        self.load_state_dict(found)


def write_model(rows: torch.Tensor, out: Path, *, steps: int, device: str) -> None:
    """Trains the model and then its head on rows of token ids, and writes both in BF16."""
    from safetensors.torch import load_file, save_file
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(0)
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**SIZES)).to(device).train()
    train(model, rows, steps, device, lambda batch: model(batch, labels=batch).loss)
    head = Head(model).to(device)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        logits = head(model, batch)[:, :-1].float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 2:].flatten())

    model.requires_grad_(False)
    train(head, rows, steps, device, loss)
    model.config.dtype = torch.bfloat16
    model.to("cpu", torch.bfloat16).eval().save_pretrained(out)
    save_file(
        {**load_file(out / "model.safetensors"), **head.tensors(model)}, out / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((out / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (out / "config.json").write_text(json_text(config) + "\n")


def train(module: nn.Module, rows: torch.Tensor, steps: int, device: str, loss_of: Any) -> None:
    """Trains a module by AdamW on batches of 16 rows, of which it takes the first 256 tokens."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=max(steps, 2))
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (16,))][:, :256].to(device)
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
