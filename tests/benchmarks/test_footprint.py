"""What counts as the memory of a process."""

import pytest
import torch
from torch import nn

from benchmarks import footprint

MIB = 2**20


@pytest.mark.slow
def test_alive_bytes_count_each_storage_once_with_gradients() -> None:
    before = footprint.alive_bytes()
    weight = nn.Parameter(torch.zeros(MIB // 4))
    view = weight.detach()[: MIB // 8]

    assert footprint.alive_bytes() - before == MIB
    weight.grad = torch.zeros_like(weight)
    assert footprint.alive_bytes() - before == 2 * MIB
    del weight, view
    assert footprint.alive_bytes() == before


def test_memory_that_torch_did_not_allocate_is_no_state() -> None:
    # The shared memory between ranks is made of such tensors, and was counted as state of the model.
    before = footprint.alive_bytes()
    shared = torch.frombuffer(bytearray(MIB), dtype=torch.uint8)
    assert footprint.alive_bytes() == before
    copied = shared.clone()
    assert footprint.alive_bytes() - before == copied.nbytes == MIB


def test_the_peak_is_at_least_what_was_touched() -> None:
    touched = torch.ones(64 * MIB // 4)
    assert footprint.peak_bytes() > touched.nbytes
