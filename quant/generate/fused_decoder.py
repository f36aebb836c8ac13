"""`Decoder` writes one token of a Llama-like model in few launches, and those as one CUDA graph.

transformers runs a model module by module: some thirty launches a layer, each from Python, and launching takes longer
than the GPU needs to compute. Here a layer is ten launches: the matmuls, of which q, k and v are one and gate and up
are one, and the steps of `quant.kernels.attention.portable_decoder_step` between them. They read and write tensors at
fixed addresses, so a token is the replay of a graph.

The prompt runs through transformers, whose keys and values are then put into pages; the pages of a `QuantizedKVCache`
are written on where they are. The first token is computed both ways: a model whose logits differ is left to
transformers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quant.formats.tensor import BlockScaledTensor
from quant.generate.key_rotation import Turn
from quant.kernels.attention.attention_operands import ScoreKeywords
from quant.kernels.attention.kv_pages import HEAD_DIMS, KVPages, write_reference
from quant.kernels.attention.paged_attention import paged_attention
from quant.kernels.base.hardware import has_triton
from quant.kernels.base.weight_layout import is_prepacked
from quant.kernels.linear.quant_linear import QuantLinear
from quant.models.gguf_architectures import head_dim

FAMILIES = tuple(f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3"))
"""Classes of transformers whose layers `Decoder` can compute."""
_LINEARS = (".q_proj", ".k_proj", ".v_proj", ".o_proj", ".gate_proj", ".up_proj", ".down_proj")
_GATES = {"silu": False, "gelu_pytorch_tanh": True}
_PAGE = 64
# Tokens after the end of a text, at most this many, are thrown away.
_LOOK = 16  # tokens between two reads of the written tokens; a read waits for the GPU
_ROPES = ("default", "linear", "llama3", "yarn")  # an angle depends only on its position
# Relative errors of logits, see `Decoder.agrees`.
_CLOSE, _CLOSE_ROUNDED = 0.1, 0.5
# Fields of a generation config that do not change which token is the likeliest.
_HARMLESS = frozenset({
    "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_from_model_config", "do_sample",
    "temperature", "top_p", "top_k", "min_p", "typical_p", "max_length", "max_new_tokens", "use_cache", "num_beams",
    "cache_implementation", "output_attentions", "output_hidden_states", "return_dict_in_generate",
})  # fmt: skip


def merge_rows(members: Sequence[nn.Module], dtype: torch.dtype) -> nn.Module | None:
    """Returns one linear with the outputs of all members side by side: one launch for q, k and v instead of three.

    The members, on one device, still work: their buffers become views of its rows, so nothing is held twice. `dtype` is
    that of the inputs, which decides the layout of a quantized weight. None where the members differ in more than their
    rows: in formats, in scales of a whole matrix, in their work on the input.
    """
    if all(type(member) is nn.Linear for member in members):
        return _merged_plain(members)  # type: ignore[arg-type]
    if all(type(member) is QuantLinear for member in members):
        return _merged_quantized(members, dtype)  # type: ignore[arg-type]
    return None


def _merged_plain(members: Sequence[nn.Linear]) -> nn.Linear | None:
    if len({(member.weight.dtype, member.in_features) for member in members}) > 1:
        return None
    rows = [member.out_features for member in members]
    merged = nn.Linear(members[0].in_features, sum(rows), bias=False, device="meta")
    weight = torch.cat([member.weight.detach() for member in members])
    merged.weight = nn.Parameter(weight, requires_grad=False)
    merged.register_parameter("bias", _bias_of(members))
    for member, part in zip(members, weight.split(rows), strict=True):
        member.weight.data = part
    return merged


def _merged_quantized(members: Sequence[QuantLinear], dtype: torch.dtype) -> QuantLinear | None:
    first = members[0]
    weights = [member.stored_weight for member in members]

    def share_scale(weights: list[BlockScaledTensor]) -> bool:
        return all(_are_equal(weight.global_scale, weights[0].global_scale) for weight in weights)

    # Words of prepacked weights can be joined as they are if they share a global scale; MXFP4 may differ in it there.
    if not all(map(is_prepacked, weights)) or not share_scale(weights):
        weights = [member.quantized_weight for member in members]
    alike = all(
        member.weight_format == first.weight_format
        and member.activation_format == first.activation_format
        and member.in_features == first.in_features
        and _are_equal(member.input_scale, first.input_scale)
        and weight.scale.dim() > 0
        and len(weight.scale) == len(weight.codes)
        and not member.parts
        for member, weight in zip(members, weights, strict=True)
    )
    if not (alike and share_scale(weights)):
        return None
    rows = [member.out_features for member in members]
    codes, scale = (torch.cat(parts) for parts in zip(*((w.codes, w.scale) for w in weights), strict=True))
    whole = BlockScaledTensor(
        codes, scale, first.weight_format, (sum(rows), first.in_features), weights[0].global_scale
    )
    merged = QuantLinear(whole, _bias_of(members), first.activation_format, first.input_scale, dtype=first.dtype)
    merged.arrange(dtype)
    stored = merged.stored_weight
    start = 0
    for member, count in zip(members, rows, strict=True):
        part = slice(start, start + count)
        # Views: the rows of a member lie in the merged tensors, so nothing is stored twice.
        member.take(replace(stored, codes=stored.codes[part], scale=stored.scale[part], shape=(count, stored.shape[1])))
        start += count
    return merged


def _bias_of(members: Sequence[nn.Linear | QuantLinear]) -> nn.Parameter | None:
    """Returns the biases one after the other; zero where a member has none."""
    present = [member.bias for member in members if member.bias is not None]
    if not present:
        return None
    parts = [
        present[0].new_zeros(member.out_features) if member.bias is None else member.bias.detach() for member in members
    ]
    return nn.Parameter(torch.cat(parts), requires_grad=False)


def _are_equal(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))


def decoder_refusal(model: nn.Module) -> str:
    """Returns the reason why `Decoder` does not take a model; empty where it does."""
    family, config = type(model).__name__, getattr(model, "config", None)
    if config is None or family not in FAMILIES:
        return f"{family} is none of {', '.join(FAMILIES)}"
    device, dtype = _device(model), model.model.norm.weight.dtype  # type: ignore[union-attr]
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = {each.get("rope_type", "default") for each in (rope, *(x for x in rope.values() if isinstance(x, dict)))}
    options = model.generation_config.to_diff_dict().keys() - _HARMLESS  # type: ignore[operator, union-attr]
    for wrong, reason in (
        (not has_triton(), "Triton is not installed"),
        (device.type != "cuda", f"the model is on {device}"),
        (dtype not in (torch.bfloat16, torch.float16), f"the model is in {dtype}"),
        (_gate(config) not in _GATES, f"its MLP is gated by {_gate(config)}"),
        (not ropes <= set(_ROPES), f"its rotary embedding is {', '.join(sorted(ropes))}"),
        (getattr(config, "use_bidirectional_attention", False), "its attention looks ahead"),
        (head_dim(config) not in HEAD_DIMS, f"its head dimension is {head_dim(config)}"),
        (bool(options), f"its generation config sets {', '.join(sorted(options))}"),
    ):
        if wrong:
            return reason
    for name, module in model.named_modules():
        if name.endswith(_LINEARS) and (
            type(module) not in (nn.Linear, QuantLinear) or module._forward_hooks or module._forward_pre_hooks
        ):
            return f"{name} is a {type(module).__name__}, perhaps with hooks"
    return ""


class Decoder:
    """One sequence of a model, a token at a time.

    From then on the model, one for which `decoder_refusal` gives nothing, shares the memory of its matrices with the
    decoder, and works as before. `room` is the number of positions; with `has_quantized_cache`, `begin` gets a
    `QuantizedKVCache`.
    """

    def __init__(self, model: nn.Module, room: int, *, has_quantized_cache: bool = False) -> None:
        body: Any = model.model
        # The norms have the dtype of activations.
        device, dtype, self.room = _device(model), body.norm.weight.dtype, room
        self.embed, self.head, self.norm = body.embed_tokens, model.get_output_embeddings(), _of_norm(body.norm)  # type: ignore[operator]
        pages = -(-room // _PAGE)
        self.has_quantized_cache = has_quantized_cache
        pages_held = 1 if has_quantized_cache else pages
        self.layers = [_Layer(model.config, layer, index, pages_held, dtype) for index, layer in enumerate(body.layers)]
        # All angles at once: a step then gathers a row, which a CUDA graph can replay.
        probe = torch.empty(1, 1, 1, device=device, dtype=dtype)  # gives the dtype and the device
        places = torch.arange(room, device=device)[None]
        kinds = getattr(body.rotary_emb, "layer_types", None)  # Gemma 3 turns sliding layers by other angles
        angles = {kind: body.rotary_emb(probe, places, *([kind] if kinds else [])) for kind in kinds or [None]}
        self.angles = {kind: (cos[0].contiguous(), sin[0].contiguous()) for kind, (cos, sin) in angles.items()}
        self.softcap = getattr(model.config, "final_logit_softcapping", None)
        self.table = torch.arange(pages, dtype=torch.int32, device=device)[None]
        self.lengths = torch.zeros(1, dtype=torch.int32, device=device)
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.written = torch.zeros(room + 1, dtype=torch.int64, device=device)
        self.finite = torch.ones((), dtype=torch.bool, device=device)
        linears = (module for module in model.modules() if isinstance(module, QuantLinear))
        self.rounds_inputs = any(linear.activation_format is not None for linear in linears)
        self.replay: Callable[[], object] | None = None

    def begin(self, cache: Any, token: int) -> None:
        """Takes the keys and values of a prompt from transformers' cache, and the token behind it."""
        count = cache.get_seq_length()
        start = torch.zeros(1, dtype=torch.int32, device=self.table.device)
        for layer, held in zip(self.layers, cache.layers, strict=True):
            if self.has_quantized_cache:
                pages, table = held.reserve(self.room)
                layer.quantized = _Quantized(pages, table, held.turn, torch.ones_like(start))
                continue
            # A sliding layer of the cache has only the last keys; no query will see the others.
            write_reference(layer.pages, self.table, start + (count - held.keys.shape[2]), held.keys, held.values)
        self.lengths.fill_(count)
        self.token.fill_(token)
        self.written[count] = token

    def step(self) -> Tensor:
        """Takes the token in, and chooses the next one; gives its logits `[1, vocabulary]`."""
        from quant.kernels.attention.portable_decoder_step import add_rmsnorm

        # A copy, since the line below changes the lengths in place; both are read by kernels of this step.
        before = self.lengths.clone()
        self.lengths += 1
        position = before.long()
        angles = {
            kind: (cos.index_select(0, position), sin.index_select(0, position))
            for kind, (cos, sin) in self.angles.items()
        }
        x, residual = self.embed(self.token), None
        for layer in self.layers:
            angle = angles[layer.kind if layer.kind in angles else None]
            x, residual = layer(x, residual, angle, self.table, before, self.lengths, self.room)
        logits: Tensor = self.head(add_rmsnorm(x, residual, **self.norm)[0])
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        # Kept on the GPU and read with the tokens: a check at each step would wait for it.
        self.finite &= (logits < torch.inf).all()
        # In place: the next replay of the graph reads the token at the same address.
        self.token.copy_(logits.argmax(-1))
        self.written.index_copy_(0, position + 1, self.token)
        return logits

    def agrees(self, logits: Tensor, expected: Tensor) -> bool:
        """Returns whether the logits of a step equal transformers', up to the order of sums.

        In BF16 that is some 2%. Where inputs are rounded to four bits, a last bit changes their codes, and the
        logits of a small model by as much as computing them in float32 does.
        """
        error = (logits.float() - expected.float()).norm() / expected.float().norm()
        return bool(error <= (_CLOSE_ROUNDED if self.rounds_inputs else _CLOSE))

    def capture(self) -> None:
        """Makes a graph of the step, which must have run once; `run` replays it."""
        # The step ran once before: kernels are compiled, launches chosen and counters allocated outside the capture.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.replay = graph.replay

    def run(self, start: int, end: int, stops: Sequence[int], *, steps_done: int = 0) -> Iterator[list[int]]:
        """Yields the tokens at positions `start` (of the token that `begin` got) to `end`, or up to one of `stops`.

        Some come at a time, and positions after the end of the text may be written, too. `steps_done` counts the steps
        since `begin`.
        """
        # `written` is the first position whose token is not yet launched.
        written = start + 1 + steps_done
        while start < end:
            # Several steps are launched before the host waits for the tokens that they write.
            upto = min(max(start + _LOOK, written), end)
            for _ in range(upto - written):
                (self.replay or self.step)()
            written = upto
            tokens = self.written[start:upto].tolist()
            last = next((i for i, token in enumerate(tokens) if token in stops), None)
            if last is not None:
                yield tokens[: last + 1]
                return
            yield tokens
            start = upto


@dataclass(frozen=True)
class _Quantized:
    """A layer's part of a quantized cache."""

    pages: KVPages
    table: Tensor  # the block table
    turn: Turn | None  # of queries and keys
    first: Tensor  # the length of a sequence whose only token is the newest, int32 `[1]`


class _Layer:
    """A decoder layer, ten launches a token; twelve where the outputs of attention and MLP are normed, too.

    `pages` hold the keys and values. With a quantized cache they hold only the newest token's: further launches turn
    them and write them to the pages of the cache.
    """

    quantized: _Quantized | None = None

    def __init__(self, config: Any, layer: Any, index: int, pages: int, dtype: torch.dtype) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        # Where linears with the same input cannot be merged, their outputs are joined.
        self.qkv, self.gate_up = (
            merge_rows(members, dtype) or (lambda x, members=members: torch.cat([member(x) for member in members], -1))
            for members in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj])
        )
        self.out, self.down, self.gelu = attention.o_proj, mlp.down_proj, _GATES[_gate(config)]
        self.before, self.between = _of_norm(layer.input_layernorm), _of_norm(layer.post_attention_layernorm)
        # Llama norms inputs only. Gemma 2 norms the outputs of attention and MLP too, before they are added.
        self.of_outputs = None
        if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma 2's
            self.of_outputs = self.between, _of_norm(layer.post_feedforward_layernorm)
            self.between = _of_norm(layer.pre_feedforward_layernorm)
        self.of_heads: dict[str, Any] = {}
        if hasattr(attention, "q_norm"):  # Qwen3's
            norms = _of_norm(attention.q_norm), _of_norm(attention.k_norm)
            self.of_heads = {**norms[0], "norms": (norms[0]["weight"], norms[1]["weight"])}
            del self.of_heads["weight"]
        dim = head_dim(config)
        shape = (pages, config.num_key_value_heads, _PAGE, dim)
        k, v = (torch.zeros(shape, device=layer.input_layernorm.weight.device, dtype=dtype) for _ in range(2))
        self.pages = KVPages(k, v, None, dim)
        kinds = getattr(config, "layer_types", None)
        self.kind = kinds[index] if kinds else None
        # Without `layer_types` a window, where the config has one, is for all layers (Mistral).
        slides = kinds is None or self.kind == "sliding_attention"
        self.scores: ScoreKeywords = {
            "window": getattr(config, "sliding_window", None) if slides else None,
            "softcap": getattr(attention, "attn_logit_softcapping", None),
            "softmax_scale": attention.scaling,
        }

    def __call__(
        self, x: Tensor, residual: Tensor | None, angle: tuple[Tensor, Tensor], table: Tensor, before: Tensor,
        lengths: Tensor, room: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns the output of the MLP, which the next layer adds to the hidden state of the token, and that state."""
        from quant.kernels.attention.portable_decoder_step import add_rmsnorm, rotate_and_store, swiglu
        from quant.kernels.attention.portable_paged_kv_cache import write_kv

        normed, residual = add_rmsnorm(x, residual, **self.before)
        pages, cache = self.pages, self.quantized
        q = rotate_and_store(
            self.qkv(normed), *angle, pages, table, lengths if cache is None else cache.first, **self.of_heads
        )
        if cache is not None:
            # The one token's keys and values in 16 bit, which the kernel above has rotated into a page of their own.
            k, v = pages.k[:, :, :1], pages.v[:, :, :1]
            if cache.turn is not None:
                q, k = cache.turn.q(q), cache.turn.k(k)
            pages, table = cache.pages, cache.table
            write_kv(pages, table, before, k, v)
        attended = paged_attention(q, pages, table, lengths, max_length=room, shortest=1, **self.scores)
        out = self.out(attended.flatten(1))
        if self.of_outputs is not None:
            out, _ = add_rmsnorm(out, None, **self.of_outputs[0])
        normed, residual = add_rmsnorm(out, residual, **self.between)
        out = self.down(swiglu(self.gate_up(normed), gelu=self.gelu))
        if self.of_outputs is not None:
            out, _ = add_rmsnorm(out, None, **self.of_outputs[1])
        return out, residual


def _of_norm(norm: Any) -> dict[str, Any]:
    """Returns the arguments of `add_rmsnorm` for the norm of a module. Gemma's adds its weight to 1."""
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return {"weight": norm.weight, "eps": eps, "offset": type(norm).__name__.startswith("Gemma")}


def _gate(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _device(model: nn.Module) -> torch.device:
    return model.model.norm.weight.device  # type: ignore[union-attr, return-value]
