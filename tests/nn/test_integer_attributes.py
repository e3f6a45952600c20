"""Whole numbers in attributes: which there are, how far they moved, and others for a while."""

import torch
from torch import Tensor, nn

from echelon.nn.forward_state import (
    attributes,
    attributes_as,
    integer_attributes,
    moved_integers,
    named_integers,
)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.scale, self.is_used = 5, 1.0, False

    def forward(self, x: Tensor) -> Tensor:
        self.seen, self.is_used = self.seen + len(x), True
        self.calls = getattr(self, "calls", 0) + 1
        return x


def test_numbers_are_whole_ones_of_the_users_modules() -> None:
    inner = Counting()
    model = nn.Sequential(inner, nn.Linear(2, 2), nn.Dropout())
    assert integer_attributes(model.modules()) == {(inner, "seen"): 5}
    assert named_integers(model) == {"0.seen": 5}
    assert named_integers(inner) == {"seen": 5}


def test_how_far_they_moved() -> None:
    model = nn.Sequential(Counting())
    before = named_integers(model)
    model(torch.zeros(3, 2))
    assert moved_integers(before, named_integers(model)) == {"0.seen": 3, "0.calls": 1}
    assert moved_integers({"a": 3, "b": 1, "c": 2}, {"a": 0, "b": 1}) == {"a": -3}


def test_others_for_a_while() -> None:
    module = Counting()
    before = attributes([(module, "seen"), (module, "calls")])
    for _ in range(2):
        module(torch.zeros(3, 2))
    with attributes_as(before):
        assert (module.seen, hasattr(module, "calls")) == (5, False)
        module(torch.zeros(1, 2))
        assert (module.seen, module.calls) == (6, 1)
    assert (module.seen, module.calls) == (11, 2)


def test_an_attribute_that_has_gone_meanwhile_stays_away() -> None:
    module = Counting()
    before = attributes([(module, "seen")])
    del module.seen
    with attributes_as(before):
        assert module.seen == 5
    assert not hasattr(module, "seen")
