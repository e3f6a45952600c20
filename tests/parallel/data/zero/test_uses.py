"""Uses of modules: entered before and left after, forward and backward, whatever a module does."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.zero.uses import Use, UseHooks


class Log:
    """Watches modules, and notes down when their units are entered and left: 'F0 f0 B0 b0'."""

    def __init__(self, *modules: nn.Module) -> None:
        self.events: list[str] = []
        self.returned: list[tuple[int, Tensor]] = []
        self.uses: list[Use] = []
        self._inside: dict[Use, str] = {}
        self.wrapping = Wrapping()
        self.hooks = UseHooks(list(modules), self.wrapping, self._enter, self._leave, self._returned)

    def _enter(self, use: Use, backward: bool) -> None:
        assert use not in self._inside, "entered twice"
        self._inside[use] = "b" if backward else "f"
        self.events.append(f"{'B' if backward else 'F'}{use.unit}")
        self.uses.append(use)

    def _leave(self, use: Use) -> None:
        self.events.append(f"{self._inside.pop(use)}{use.unit}")

    def _returned(self, use: Use, tensor: Tensor) -> None:
        self.returned.append((use.unit, tensor))

    @property
    def text(self) -> str:
        assert not self._inside, "never left"
        return " ".join(self.events)


def wanting_input() -> Tensor:
    return torch.ones(1, 2, requires_grad=True).clone()  # not a leaf


def test_units_are_held_during_the_forward_and_again_during_the_backward() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    log = Log(*model)
    output = model(wanting_input())
    assert log.text == "F0 f0 F1 f1 F2 f2"
    log.events.clear()
    output.sum().backward()
    assert log.text == "B2 b2 B1 b1 B0 b0", "a unit is left before the next one is entered"


def test_without_gradients_there_is_no_way_back() -> None:
    model = nn.Linear(2, 2)
    log = Log(model)
    with torch.no_grad():
        model(wanting_input())
    assert log.text == "F0 f0"
    assert not log.uses[0].watched


def test_a_module_that_is_called_twice_has_two_uses() -> None:
    layer = nn.Linear(2, 2)
    log = Log(layer)
    output = layer(torch.tanh(layer(wanting_input())))
    output.sum().backward()
    assert log.text == "F0 f0 F0 f0 B0 b0 B0 b0"
    assert len(set(log.uses)) == 2


def test_a_module_inside_another_is_entered_inside_of_it() -> None:
    outer = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    log = Log(outer, outer[0], outer[2])
    output = outer(wanting_input())
    assert log.text == "F0 F1 f1 F2 f2 f0"
    log.events.clear()
    output.sum().backward()
    assert log.text == "B2 B0 b2 B1 b0 b1"


def test_without_an_input_that_wants_a_gradient_the_use_stays_until_its_owner_ends_it() -> None:
    """The embedding of tokens: no gradient of an input says that the backward pass is through."""
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2))
    log = Log(*model)
    model(torch.tensor([1, 2])).sum().backward()
    assert log.events[4:] == ["B1", "b1", "B0"]
    use = log.uses[-1]
    assert (use.unit, use.watched, use.in_backward) == (0, False, True)
    log.hooks.end_backward(use)
    log.hooks.end_backward(use)  # a second time changes nothing
    assert log.events[7:] == ["b0"]


def test_a_backward_pass_enters_a_use_once() -> None:
    """Two outputs: the gradient of each says that the backward pass has come to the module."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), self.layer(2 * x)

    module = Two()
    log = Log(module)
    first, second = module(wanting_input())
    (first.sum() + second.sum()).backward()
    assert log.text == "F0 f0 B0 b0"


class Apart(nn.Module):
    """Its second output depends on no input, and gets its gradient last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        second = 2 * self.scale
        return self.layer(x), second


def test_a_use_that_is_over_is_not_entered_again() -> None:
    """Nothing would say when to leave it."""
    module = Apart()
    log = Log(module)
    first, second = module(wanting_input())
    (first.sum() + second.sum()).backward()
    assert log.text == "F0 f0 B0 b0"


class Fails(nn.Module):
    def forward(self, _: Tensor) -> Tensor:
        raise RuntimeError("as asked")


def test_a_forward_that_fails_leaves_too() -> None:
    module = Fails()
    log = Log(module)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="as asked"):
            module(wanting_input())
    assert log.text == "F0 f0 F0 f0"


@dataclass
class Output:
    hidden: Any


class Nested(nn.Module):
    """Returns tensors inside objects that torch does not look into."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor, *, more: Output) -> Output:
        return Output({"a": [Output(self.layer(x + more.hidden))]})


def test_tensors_are_found_in_structures_and_objects() -> None:
    module = Nested()
    log = Log(module)
    outside, more = torch.ones(1, 2), wanting_input()
    output = module(outside, more=Output(more))
    hidden = output.hidden["a"][0].hidden
    assert [(unit, tensor is hidden) for unit, tensor in log.returned] == [(0, True)]
    hidden.sum().backward()
    assert log.text == "F0 f0 B0 b0"


class Slots:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class InSlots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Slots:
        return Slots(self.layer(x))


def test_tensors_are_found_in_slots() -> None:
    module = InSlots()
    log = Log(module)
    module(wanting_input()).hidden.sum().backward()
    assert log.text == "F0 f0 B0 b0"


class Returns(nn.Module):
    """Returns its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self) -> Tensor:
        return self.weight


def test_a_leaf_that_is_returned_is_reported_and_gets_no_hook() -> None:
    """The hook would stay on the leaf forever, and be called in every step."""
    module = Returns()
    log = Log(module)
    module().sum().backward()
    assert log.text == "F0 f0"
    assert [(unit, tensor is module.weight) for unit, tensor in log.returned] == [(0, True)]
    assert not module.weight._backward_hooks


def test_removed_hooks_are_gone() -> None:
    module = nn.Linear(2, 2)
    log = Log(module)
    log.wrapping.remove()
    module(wanting_input()).sum().backward()
    assert log.events == []


def test_a_leaf_does_not_say_that_a_module_is_through() -> None:
    """Its gradient may come before those of the weights; the inputs of a reentrant checkpoint are leaves."""
    model = nn.Linear(2, 2)
    log = Log(model)
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert log.events == ["F0", "f0", "B0"]
    log.hooks.end_backward(log.uses[0])
    assert log.text == "F0 f0 B0 b0"
