"""Pairs of a checkpoint and a runtime that are known to fail, as data: what, where, since and until which release.

`quantize` and `save` warn from this table, and docs/vllm.md shows it. An entry is measured on a GPU or read in the
runtime's source; `Failure.source` says which. A release beyond `until` may have the fault still: it was not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """One fault of a runtime.

    Attributes:
        runtime: the name of the runtime in a sentence.
        since, until: first and last release that have it.
        subject: formats and kinds of layer, or the feature of the checkpoint.
        gpus: the GPUs on which the failure appears.
        effect: the consequence for a user.
        source: how it is known.
    """

    runtime: str
    since: str
    until: str
    subject: str
    effect: str
    gpus: str = "all"
    source: str = ""

    def row(self) -> str:
        """Returns the row of docs/vllm.md."""
        return f"| {self.subject} | {self.releases} | {self.gpus} | {self.effect} | {self.source} |"

    @property
    def releases(self) -> str:
        """In words: "vLLM 0.26" or "vLLM 0.26 to 0.33"."""
        return f"{self.runtime} {self.since}" + (f" to {self.until}" if self.until != self.since else "")


FAILURES: dict[str, Failure] = {
    "mxfp6": Failure(
        "vLLM", "0.26", "0.29", "weights in MXFP6",
        "stops: Only num_bits in (8) are supported (compressed-tensors 0.17, QuantizationArgs.pytorch_dtype)",
        source="run on an H100 in 0.26 and 0.29",
    ),
    "narrow int4 experts": Failure(
        "vLLM", "0.26", "0.33", "experts in INT4 that are no wider than a group",
        "wrong output: the scales of gate and up are put into a wrong order (fused_moe/oracle/int_wna16.py, "
        "_process_weights_marlin)",
        source="run on an H200 in 0.26, read in 0.29 and 0.33",
    ),
    "rotation": Failure(
        "vLLM", "0.26", "0.26", "inputs that are rotated at run time",
        "wrong output: the first token is right, then one token repeats",
        source="run on an H100",
    ),
    "modelopt mxfp4": Failure(
        "vLLM", "0.26", "0.29", "MXFP4 and INT4 in ModelOpt's layout",
        "stops: no known algorithm (model_executor/layers/quantization/modelopt.py, QUANT_ALGOS)",
        source="run on an H100 in 0.26 and 0.29",
    ),
    "fp8 weights": Failure(
        "vLLM", "0.26", "0.26", "weights in FP8 with inputs in 16 bit",
        "stops without the package humming, unless our plug-in takes the layers", source="run on an H200",
    ),
    "fp8 weights of experts": Failure(
        "vLLM", "0.26", "0.33", "experts in FP8 with inputs in 16 bit",
        "stops: Unsupported FusedMoe scheme, unless our plug-in takes the experts",
        source="read in 0.26 to 0.33 (compressed_tensors_moe.py)",
    ),
    "w4a4 on hopper": Failure(
        "vLLM", "0.26", "0.29", "NVFP4, MXFP4 and MXFP8 with rounded inputs",
        "runs with inputs in 16 bit: slower than FP8, and more precise than the report says", "before Blackwell",
        source="run on an H100 in 0.26 and 0.29",
    ),
    "nvfp4 experts": Failure(
        "transformers", "5.17", "5.24", "fused experts in NVFP4",
        "wrong output: their global scale is dropped", source="run on a CPU",
    ),
}  # fmt: skip
