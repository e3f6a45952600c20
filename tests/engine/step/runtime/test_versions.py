"""Versions of weights: modules see the one that is asked for, and gradients reach the parameters."""

import weakref

import pytest
import torch
from torch import Tensor, nn

from echelon.engine.step.runtime.versions import Versions


def reallocate(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def versions_of(module: nn.Module) -> Versions:
    return Versions([module], lambda: reallocate(module))


@torch.no_grad()
def update(module: nn.Module, versions: Versions) -> None:
    for parameter in module.parameters():
        parameter.add_(1.0)
    versions.newest += 1


def weight_seen(module: nn.Linear, versions: Versions, version: int) -> float:
    with versions.using(version):
        return module.weight[0, 0].item()


def test_modules_see_the_version_that_is_asked_for() -> None:
    module = nn.Linear(2, 2)
    nn.init.zeros_(module.weight)
    versions = versions_of(module)
    versions.stash(0)
    update(module, versions)
    versions.stash(1)
    update(module, versions)
    assert [weight_seen(module, versions, version) for version in (0, 1, 2)] == [0.0, 1.0, 2.0]
    assert isinstance(module.weight, nn.Parameter)
    assert versions.num_alive == 3


def test_a_version_that_was_not_stashed_is_overwritten_and_asked_for_in_vain() -> None:
    module = nn.Linear(2, 2)
    versions = versions_of(module)
    update(module, versions)
    with pytest.raises(AssertionError, match="version 0 is gone"), versions.using(0):
        pass
    with pytest.raises(AssertionError, match="version 2 is gone or not there yet"), versions.using(2):
        pass
    with pytest.raises(AssertionError):
        versions.stash(0)


def test_gradients_are_those_of_the_version_and_reach_the_parameter() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    versions = versions_of(module)
    module.double()
    x = torch.full((1, 1), 3.0, dtype=torch.float64, requires_grad=True)
    with versions.using(0):
        output = module(torch.tanh(module(x)))
    versions.stash(0)
    update(module, versions)
    heard = []
    module.weight.register_post_accumulate_grad_hook(lambda p: heard.append(p))
    output.sum().backward()
    t = torch.tanh(torch.tensor(3.0, dtype=torch.float64))
    assert module.weight.grad is not None
    assert module.weight.grad.item() == pytest.approx(float(t + (1 - t * t) * 3))
    assert x.grad is not None
    assert x.grad.item() == pytest.approx(float(1 - t * t))
    assert heard == [module.weight]


def test_a_stash_copies_nothing_and_a_pop_frees() -> None:
    module = nn.Linear(2, 2)
    versions = versions_of(module)
    first = module.weight.data_ptr()
    versions.stash(0)
    assert versions.storages()[0].data_ptr() == first
    assert module.weight.data_ptr() != first
    gone = weakref.ref(versions.storages()[0])
    update(module, versions)
    versions.pop(0)
    assert gone() is None
    assert versions.num_alive == 1


def test_a_restart_counts_from_the_weights_of_now() -> None:
    module = nn.Linear(2, 2)
    versions = versions_of(module)
    versions.stash(0)
    update(module, versions)
    now = module.weight[0, 0].item()
    versions.restart()
    assert versions.num_alive == 1
    assert weight_seen(module, versions, 0) == now


class Everything(nn.Module):
    """Weights in places where modules keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 3, batch_first=True)
        self.list = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))])
        self.shared = nn.Linear(3, 3)
        self.again = self.shared
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lstm(x)[0] * self.list[0] + self.list[1]
        output: Tensor = self.normed(self.again(self.shared(x))) * self.frozen
        return output


def test_weights_are_seen_wherever_modules_keep_them() -> None:
    torch.manual_seed(0)
    module = Everything()
    versions = versions_of(module)
    x = torch.randn(2, 4, 3)
    before = module(x)
    flat = list(module.lstm._flat_weights)
    versions.stash(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)
    versions.newest = 1
    after = module(x)
    with versions.using(0):
        old = module(x)
    with versions.using(1):
        new = module(x)
    torch.testing.assert_close(old, before)
    torch.testing.assert_close(new, after)
    assert not torch.allclose(before, after)
    old.sum().backward()
    assert all(p.grad is not None for p in module.parameters() if p.requires_grad)
    assert module.frozen.grad is None
    assert all(a is b for a, b in zip(module.lstm._flat_weights, flat, strict=True))


def test_parameters_come_back_when_a_forward_fails() -> None:
    module = nn.Linear(2, 2)
    versions = versions_of(module)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), versions.using(0):
        module(torch.ones(3, 3))
    assert isinstance(module.weight, nn.Parameter)
