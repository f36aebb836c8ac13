"""A module runs with other tensors than its own, which are back afterwards, whatever it shares."""

import torch
from torch import nn

from quant.recipes.blocks import other_tensors, run_with


class Shared(nn.Module):
    """A layer in two places, a parameter of two layers, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.again, self.tied.weight = self.first, self.first.weight
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.again(self.first(x)).tanh()) + self.offset  # type: ignore[no-any-return]


def test_a_module_in_two_places_runs_with_other_tensors_and_keeps_its_own() -> None:
    model, x = Shared(), torch.randn(2, 4)
    before = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    doubled = other_tensors(model, lambda tensor: tensor.detach() * 2)
    result = run_with(model, doubled, x)
    after = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    assert after.keys() == before.keys()
    assert all(after[name] is tensor for name, tensor in before.items())
    with torch.no_grad():
        for tensor in {id(tensor): tensor for tensor in before.values()}.values():
            tensor.mul_(2)
        assert torch.equal(result, model(x))


def test_tensors_may_stay() -> None:
    model = Shared()
    others = other_tensors(model, lambda tensor: tensor.detach().clone() if tensor.dim() > 1 else None)
    assert list(others) == ["first.weight", "tied.weight"]
    assert others["first.weight"] is others["tied.weight"]
