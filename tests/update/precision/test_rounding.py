"""Stochastic rounding: unbiased, exact where it can be, and the same however the elements are split."""

import pytest
import torch
from torch import Tensor

from echelon.nn.hashing import hash_of
from echelon.state.ownership import OwnedSlice, own_run, run_slices, whole_slice
from echelon.update.precision import rounding
from echelon.update.precision.element_runs import runs_of
from echelon.update.precision.rounding import round_stochastically

CPU = torch.device("cpu")


def rounded(value: Tensor, key: int = 1) -> Tensor:
    """All of a parameter, rounded."""
    weight = torch.empty(value.shape, dtype=torch.bfloat16)
    whole = OwnedSlice(whole_slice("w", value), torch.empty(value.shape, device="meta"))
    round_stochastically(weight, value, key, runs_of([whole], CPU))
    return weight


def test_the_mean_over_many_keys_is_the_value() -> None:
    """Between two neighbours, each is drawn as often as its distance says: 1024 draws are within 5 sigma."""
    values = torch.randn(64) * torch.logspace(-20, 20, 64)
    total = torch.zeros(64, dtype=torch.float64)
    num_keys = 1024
    for key in range(num_keys):
        total += rounded(values, hash_of(key)).double()
    step = values.abs().double() * 2.0**-7  # at least the distance of two neighbours
    assert ((total / num_keys - values.double()).abs() <= 5 * step / 2 / num_keys**0.5).all()
    nearest = values.bfloat16().double()
    assert ((nearest - values.double()).abs() > 5 * step / 2 / num_keys**0.5).sum() > 32, (
        "which nearest is not"
    )


def test_only_the_two_neighbours_are_drawn() -> None:
    values = torch.randn(1000)
    down = (values.view(torch.int32) >> 16 << 16).view(torch.float32)
    up = ((values.view(torch.int32) >> 16) + 1 << 16).view(torch.float32)
    drawn = rounded(values).float()
    assert ((drawn == down) | (drawn == up)).all()
    assert (drawn == down).any()
    assert (drawn == up).any()


def test_what_bf16_can_hold_stays() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)  # each bf16 there is
    stays = rounded(every.float())
    assert torch.equal(stays.isnan(), every.isnan())
    is_number = ~every.isnan()
    assert torch.equal(stays[is_number].view(torch.int16), every[is_number].view(torch.int16))


def test_what_is_not_a_number_stays_so() -> None:
    """Also where its bits are in the lower half alone, or a carry would run through all of them."""
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32)
    for key in range(50):
        assert rounded(bits.view(torch.float32), hash_of(key)).isnan().all()


@pytest.mark.parametrize("tile", [1 << 16, 8])
def test_parts_are_rounded_as_the_whole(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, columns, and runs of a flattened parameter that begin anywhere."""
    monkeypatch.setattr(rounding, "_CPU_TILE", tile)
    value = torch.randn(6, 7, 5)
    whole = rounded(value)
    for dim in range(3):
        part = value.narrow(dim, 1, 3).contiguous()
        box = whole_slice("w", value)
        offsets = tuple(int(d == dim) for d in range(3))
        box = box._replace(offsets=offsets, sizes=tuple(part.shape))
        weight = torch.empty(part.shape, dtype=torch.bfloat16)
        runs = runs_of([OwnedSlice(box, torch.empty(part.shape, device="meta"))], CPU)
        round_stochastically(weight, part, 1, runs)
        assert torch.equal(weight, whole.narrow(dim, 1, 3))
    for begin, end in [(0, 210), (3, 4), (17, 101), (34, 36), (1, 209)]:
        part = value.flatten()[begin:end]
        boxes = own_run(torch.empty(end - begin, device="meta"), run_slices("w", (6, 7, 5), begin, end))
        weight = torch.empty(end - begin, dtype=torch.bfloat16)
        round_stochastically(weight, part, 1, runs_of(boxes, CPU))
        assert torch.equal(weight, whole.flatten()[begin:end])


def test_memory_in_another_order_is_rounded_alike() -> None:
    value = torch.randn(4, 3, 2, 2)
    moved = value.contiguous(memory_format=torch.channels_last)
    weight = torch.empty_like(moved, dtype=torch.bfloat16)
    runs = runs_of([OwnedSlice(whole_slice("w", value), torch.empty(value.shape, device="meta"))], CPU)
    round_stochastically(weight, moved, 1, runs)
    assert torch.equal(weight, rounded(value))
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_padding_is_rounded_to_the_nearest() -> None:
    value = torch.randn(10)
    box = whole_slice("w", value[:6])
    weight = torch.empty(10, dtype=torch.bfloat16)
    round_stochastically(weight, value, 1, runs_of([OwnedSlice(box, torch.empty(6, device="meta"))], CPU))
    assert torch.equal(weight[6:], value[6:].bfloat16())
    assert torch.equal(weight[:6], rounded(value[:6]))


def test_keys_draw_different_noise() -> None:
    value = torch.randn(1000)
    first, second = rounded(value, hash_of(1)), rounded(value, hash_of(2))
    changed = (first != second).float().mean()
    assert 0.2 < changed < 0.5, "a third, where the lower half is uniform"
