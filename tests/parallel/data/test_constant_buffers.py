"""Buffers have a size of their own: the same with 10 million and with a billion parameters (ZeRO's CB)."""

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import RecordingGroup
from echelon.parallel.data import buffers
from echelon.parallel.data.buffers import broadcast_packed
from echelon.parallel.data.parameter_set import ShardGroups
from echelon.parallel.data.zero.flat import FlatUnit
from echelon.parallel.data.zero.gradient_sums import GradientSums
from echelon.update.precision.flat_memory import as_float32, divide
from tests.peak_memory import PeakMemory

MIB = 2**20
SHAPES = {
    10: (10, 2**20),
    1000: (1000, 2**20),
}  # millions of parameters: so many matrices of so many elements
sizes = pytest.mark.parametrize("millions", SHAPES)


def weights(millions: int, dtype: torch.dtype) -> list[nn.Parameter]:
    number, size = SHAPES[millions]
    return [nn.Parameter(torch.empty(1024, size // 1024, dtype=dtype, device="meta")) for _ in range(number)]


@sizes
def test_float32_copies_of_gradients(millions: int) -> None:
    parameters = weights(millions, torch.bfloat16)
    masters = [nn.Parameter(torch.empty_like(each, dtype=torch.float32)) for each in parameters]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    with PeakMemory(of_meta=True) as memory:
        pairs = dict(zip(parameters, masters, strict=True))
        for portion in divide(parameters, masters):
            as_float32(portion, [pairs[each] for each in portion])
    assert memory.peak == 16 * MIB


@sizes
def test_the_weights_of_the_first_rank(millions: int) -> None:
    tensors: list[Tensor] = [*weights(millions, torch.float32)]
    with PeakMemory(of_meta=True) as memory:
        broadcast_packed(tensors, RecordingGroup("data", size=2))
    assert memory.peak == 32 * MIB


def test_a_tensor_larger_than_the_buffer_is_broadcast_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "BYTES_AT_ONCE", 4096)
    for tensor, extra in ((torch.zeros(8, 1024), 0), (torch.zeros(1024, 8).t(), 4096)):
        group = RecordingGroup("data", size=2)
        with PeakMemory(of_meta=True) as memory:
            broadcast_packed([tensor], group)
        assert memory.peak == extra, "contiguous pieces need no copy"
        assert [move.traffic.sent for move in group.ledger.moves] == [4096] * 8


@pytest.mark.slow_cases("1000")
@sizes
def test_whole_gradients_that_are_on_their_way(millions: int) -> None:
    """Units of 1 million parameters: one is produced while another is summed."""
    group = RecordingGroup("shard", size=2)
    units = [
        FlatUnit(str(number), [("w", parameter)], group, sharded=False)
        for number, parameter in enumerate(weights(millions, torch.float32))
    ]
    for unit in units:
        unit.gradient.new_part(in_place=False)
    sums = GradientSums(ShardGroups(group, RecordingGroup("copies")), in_place=False)
    with PeakMemory(of_meta=True) as memory:
        for unit in units:
            parameter = unit.parameters[0][1]
            parameter.grad = torch.empty_like(parameter)
            unit.gradient.accumulate(parameter)
            unit.gradient.has_part = False
            sums.start(unit.gradient, last=True)
        sums.complete()
    assert memory.peak <= 3 * 4 * MIB
