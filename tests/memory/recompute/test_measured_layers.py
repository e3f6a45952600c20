"""What layers save, take and return, storage by storage; and how long they run."""

import time

import torch
from torch import Tensor

from echelon.memory.recompute.measured_layers import LayerMeasurement, SavedBytes
from echelon.memory.recompute.saved_inputs import SavedInputs

CPU = torch.device("cpu")


def measurement(*arguments: object, excluded: tuple[Tensor, ...] = ()) -> LayerMeasurement:
    storages = {tensor.untyped_storage()._cdata for tensor in excluded}
    return LayerMeasurement("layer", arguments, SavedInputs(), storages, CPU)


def test_the_costs_of_two_layers_in_a_row() -> None:
    """Each storage counts once; a weight never does. The second layer takes a mask too."""
    x, hidden, inner, weight, mask = (torch.zeros(n) for n in (10, 20, 30, 40, 5))
    first, second = measurement(x, excluded=(weight,)), measurement(hidden[5:], mask, excluded=(weight,))
    for tensor in (x, x[1:], weight, hidden):
        first.saving(tensor)
    first.returned([hidden, "text"])
    for tensor in (hidden, inner, weight.view(4, 10), mask):
        second.saving(tensor)
    cost, following = first.cost(None), second.cost(first)
    assert (first.saved_bytes, first.input_bytes) == (120, 40)
    assert (cost.saved, cost.input, cost.seconds, cost.reused, cost.shared) == (120, 40, 0.0, 40, 0)
    assert (second.saved_bytes, second.input_bytes) == (80 + 120 + 20, 80 + 20)
    assert (following.saved, following.input, following.reused, following.shared) == (220, 80, 80, 80)
    assert [(each.kept_bytes, each.keeps_memory) for each in second.elsewhere(first).values()] == [(20, True)]
    assert first.elsewhere(None) == {}


def test_seconds_are_those_of_the_layer() -> None:
    layer, begin = measurement(), time.perf_counter()
    with layer.timed():
        time.sleep(0.02)
    assert 0.02 <= layer.cost(None).seconds <= time.perf_counter() - begin


def test_what_is_saved_around_layers_counts_and_inside_of_them_does_not() -> None:
    weight, x = torch.ones(3, requires_grad=True), torch.ones(50, requires_grad=True)
    outside = SavedBytes({weight.untyped_storage()._cdata})
    with outside.count():
        y = x.exp()  # saves its result
        with outside.paused():
            z = y.exp()
        total = (z * 2).sum() + weight.square().sum()
    after = x.exp()
    assert outside.total == 50 * 4
    assert not outside.is_open
    total.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * z.detach() * y.detach())
    assert torch.equal(after, y)
