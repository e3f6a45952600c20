"""States of generators: which have moved, and what brings them back."""

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import nn

from echelon.nn.autograd.generators import GeneratorStates

HOST = torch.device("cpu")


class Drawing(nn.Module):
    """Holds generators as an attribute, in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(1)
        self.several = [random.Random(2)]
        self.named = {"old": numpy.random.RandomState(3), "new": numpy.random.default_rng(4)}


DRAWS: dict[str, Callable[[Drawing], object]] = {
    "torch": lambda _: torch.rand(1).item(),
    "random": lambda _: random.random(),
    "numpy.random": lambda _: numpy.random.rand(),
    "a Generator of its own": lambda module: torch.rand(1, generator=module.own).item(),
    "a Random of its own": lambda module: module.several[0].random(),
    "a RandomState of its own": lambda module: module.named["old"].normal(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_named_and_undone(name: str) -> None:
    module = Drawing()
    before = GeneratorStates(HOST, [module])
    assert not before.moved()
    drawn = DRAWS[name](module)
    assert before.moved()
    assert before.moved_names() == [name]
    assert not before.now().moved()
    before.restore()
    assert not before.moved()
    assert DRAWS[name](module) == drawn
    before.restore()


def test_torch_and_the_others_are_read_apart() -> None:
    module = Drawing()
    of_torch, of_others = GeneratorStates.of_torch(HOST), GeneratorStates.of_others([module])
    module.named["new"].normal()
    assert (of_torch.moved(), of_others.moved()) == (False, True)
    torch.rand(1)
    assert of_torch.moved()
    of_torch.restore()


def test_seeded_generators_go_on_afterwards() -> None:
    module = Drawing()
    states = GeneratorStates(HOST, [module])
    with states.seeded(7):
        first = [draw(module) for draw in DRAWS.values()]
    with states.seeded(7):
        assert [draw(module) for draw in DRAWS.values()] == first
    assert not states.moved()
