"""After an exception in the middle, a caller's model has its modules, tensors, values, modes and config again."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import tiny_models
import torch
from slow_cases import quick_cases
from torch import nn

from quant.calibration.solvers import rotation as rotation_merge
from quant.calibration.walk import solve, walk
from quant.calibration.walk.solve import apply_plan
from quant.recipes.plan_make import make_plan
from quant.recipes.recipe import Recipe
from quant.run.api import quantize
from quant.training.qat import prepare_qat

transformers = pytest.importorskip("transformers")

IDS = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(0))


class Stopped(BaseException):
    """As KeyboardInterrupt: no `except Exception` catches it."""


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has the installation of the n-th layer raise."""

    def fail_at(count: int) -> None:
        installed = []
        for module in (solve,):
            install = module.install_weight

            def counted(*args: Any, install: Any = install, **options: Any) -> None:
                installed.append(args)
                if len(installed) > count:
                    raise Stopped
                install(*args, **options)

            monkeypatch.setattr(module, "install_weight", counted)

    return fail_at


def seen(model: nn.Module) -> dict[str, Any]:
    """All that a caller can see of a model: objects, values, modes and config."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "modules": {name: (id(module), module.training) for name, module in model.named_modules()},
        "tensors": {name: (id(tensor), tensor.data_ptr(), tensor.requires_grad) for name, tensor in tensors.items()},
        "state": list(model.state_dict()),
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "hooks": [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()],
        "config": str(getattr(model, "config", "")),
        "flags": sorted(vars(model.config).items(), key=str) if hasattr(model, "config") else None,
    }


def checked(model: nn.Module, work: Callable[[nn.Module], Any], error: type[BaseException] = Stopped) -> None:
    """Does work that fails, and compares the model with itself before."""
    before, values = seen(model), copy.deepcopy(model.state_dict())
    with pytest.raises(error):
        work(model)
    after = seen(model)
    for kind in before:
        assert after[kind] == before[kind], kind
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, values[name]), name


SOLVERS = [
    "rtn",
    "gptq",
    "awq:merge+gptq",
    "smoothquant+rotation+lowrank:4+gptq",
    "rotation:merge+gptq",
    "gptq+autoround",
]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("solver", "count", "dtype"),
    quick_cases(
        product(SOLVERS, [0, 9], DTYPES), lambda solver, count, dtype: (count == 9) == (dtype is torch.bfloat16)
    ),
)
def test_a_solver_that_stops_leaves_the_model_whole(
    solver: str, count: int, dtype: torch.dtype, failing: Callable[[int], None]
) -> None:
    model = tiny_models.llama(tie_word_embeddings=False, dtype=dtype, gain=2.0, attention_bias=True).train()
    model.model.layers[1].eval()
    failing(count)
    checked(model, lambda m: quantize(m, "nvfp4", IDS, solver=solver))


@pytest.mark.parametrize("build", [tiny_models.gpt2, tiny_models.qwen3_moe, tiny_models.opt])
def test_transposed_layers_experts_and_biases_are_whole_again(
    build: Callable[..., nn.Module], failing: Callable[[int], None]
) -> None:
    failing(5)
    checked(build(gain=2.0), lambda m: quantize(m, "nvfp4", IDS, effort=2))


@pytest.mark.parametrize("solver", ["gptq", "awq:merge+gptq", "rotation:merge+gptq"])
@pytest.mark.parametrize("build", [tiny_models.llama, tiny_models.gpt2, tiny_models.mixtral])
def test_a_block_that_is_half_solved_is_whole_again(
    build: Callable[..., nn.Module], solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins are in the block by then, and its weights are in float32."""
    rounded, round_siblings = [], walk.round_siblings

    def stop_at_fourth(*args: Any) -> None:
        rounded.append(args)
        if len(rounded) == 4:
            raise Stopped
        round_siblings(*args)

    monkeypatch.setattr(walk, "round_siblings", stop_at_fourth)
    model = build(dtype=torch.bfloat16, gain=2.0).train()
    checked(model, lambda m: quantize(m, "nvfp4", IDS, solver=solver))


def test_a_last_step_that_fails_leaves_the_model_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is installed by then, the scales of the KV cache too."""
    monkeypatch.setattr("quant.calibration.walk.solve.mark_quantized", lambda model: 1 // 0)
    model = tiny_models.qwen3_moe()
    checked(model, lambda m: quantize(m, "nvfp4", IDS, effort=2, kv_cache="fp8"), ZeroDivisionError)


def test_nan_in_the_last_weight_leaves_the_model_whole() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    weight = model[3].weight
    with torch.no_grad():
        weight[0, 0] = torch.inf
    modules = list(model)
    for recipe in ("int8", "int8_static"):
        with pytest.raises(ValueError, match="3"):
            quantize(model, recipe, rows, effort=2)
        assert list(model) == modules and model[3].weight is weight


def test_a_rotation_that_is_stopped_leaves_the_model_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual stream is rotated by then, and the first heads are not."""

    def stop(*args: Any) -> int:
        raise Stopped

    monkeypatch.setattr(rotation_merge, "_merge_in_block", stop)
    model = tiny_models.llama(tie_word_embeddings=False, gain=2.0)
    checked(model, lambda m: quantize(m, "nvfp4", IDS, solver="rotation:merge+gptq"))


def test_a_learned_rotation_that_is_stopped_ties_the_head_again(failing: Callable[[int], None]) -> None:
    failing(3)
    model = tiny_models.llama(tie_word_embeddings=True, gain=2.0)
    checked(model, lambda m: quantize(m, "fp8", IDS, solver="rotation:learned+gptq"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.all_tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}


def test_apply_plan_and_training_leave_the_model_whole(failing: Callable[[int], None]) -> None:
    model = tiny_models.llama(tie_word_embeddings=False)
    plan = make_plan(model, "fp8_channel")
    failing(3)
    checked(model, lambda m: apply_plan(m, plan))
    checked(model, lambda m: prepare_qat(m, Recipe("mine", "int8", "int8_token"), IDS))


def test_a_budget_that_is_stopped_leaves_the_model_whole(failing: Callable[[int], None]) -> None:
    failing(3)
    checked(tiny_models.llama(gain=2.0), lambda m: quantize(m, data=IDS, bits=6.0))


def test_a_model_that_was_stopped_is_quantized_as_one_that_was_not(failing: Callable[[int], None]) -> None:
    model = tiny_models.llama(tie_word_embeddings=False, gain=2.0)
    expected = quantize(copy.deepcopy(model), "nvfp4", IDS, effort=2).model.state_dict()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "use_expert_modules", lambda model, plan: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            quantize(model, "nvfp4", IDS, effort=2)
    result = quantize(model, "nvfp4", IDS, effort=2).model.state_dict()
    assert all(torch.equal(tensor, result[name]) for name, tensor in expected.items())
