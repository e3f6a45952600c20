"""Snapshots of a model: what was changed between two of them is named, and nothing else."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from echelon.engine.watch.snapshots import GradientWatch, Structure, WeightWatch
from echelon.errors import UserError


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)))


def structure_of(module: nn.Module) -> Structure:
    return Structure({each: name or "all" for name, each in module.named_modules()})


def replace_parameter(module: nn.Sequential) -> None:
    module[0].bias = nn.Parameter(torch.zeros(4))


def replace_forward(module: nn.Sequential) -> None:
    module[0].forward = module[0].forward  # a bound method of its own


CHANGES: list[tuple[Callable[[nn.Sequential], object], str, str]] = [
    (lambda m: m.append(nn.Tanh()), "children", "module all has other modules in it"),
    (lambda m: m[1].__setitem__(0, nn.ReLU()), "children", "module 1 has other modules in it"),
    (replace_parameter, "parameters", "0.bias is another Parameter object"),
    (replace_forward, "forwards", "module 0 has got another forward"),
    (lambda m: m[0].register_forward_hook(print), "hooks", "module 0 has got a hook"),
    (lambda m: m[0].weight.register_hook(print), "weight hooks", "0.weight has got a hook"),
]


@pytest.mark.parametrize(("change", "kind", "text"), CHANGES)
def test_a_change_is_named_until_it_is_recorded(
    change: Callable[[nn.Sequential], object], kind: str, text: str
) -> None:
    module = model()
    structure = structure_of(module)
    assert structure.changes() == []
    change(module)
    assert [(each.kind, each.text) for each in structure.changes()] == [(kind, text)]
    structure.record()
    assert structure.changes() == []


def test_a_hook_that_is_gone_is_named() -> None:
    module = model()
    handle = module[1].register_forward_pre_hook(print)
    structure = structure_of(module)
    handle.remove()
    assert [each.text for each in structure.changes()] == ["module 1 has lost a hook"]


def test_values_of_weights_are_no_structure() -> None:
    module = model()
    structure = structure_of(module)
    with torch.no_grad():
        module[0].weight.add_(1)
    assert structure.changes() == []


def test_weights_are_changed_in_place_or_get_other_memory() -> None:
    parameters = dict(model().named_parameters())
    watch = WeightWatch(parameters)
    with torch.no_grad():
        parameters["0.weight"].add_(1)
    parameters["1.1.bias"].data = torch.zeros(2)
    assert list(watch.changed()) == ["0.weight", "1.1.bias"]
    watch.check_forms(watch.changed())
    watch.record()
    assert watch.changed() == {}


def test_memory_of_another_form_is_refused() -> None:
    parameters = dict(model().named_parameters())
    watch = WeightWatch(parameters)
    parameters["0.bias"].data = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(UserError, match=r"0.bias is \(4,\) of torch.float64 on cpu now, and parallelize was"):
        watch.check_forms(watch.changed())


def test_gradients_that_change_while_they_wait_are_seen_until_the_update() -> None:
    parameter = nn.Parameter(torch.ones(2))
    gradients = GradientWatch([parameter])
    parameter.sum().backward()
    assert not gradients.look(), "nothing waits"
    gradients.is_on = True
    assert not gradients.look()
    parameter.sum().backward()
    assert gradients.look()
    gradients.record()
    gradients.is_on = True
    assert gradients.look(), "another call of the engine does not hide it"
    gradients.is_on = False
    assert not gradients.look()
    gradients.is_on = True
    parameter.grad = None
    assert gradients.look()
