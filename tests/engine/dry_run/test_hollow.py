"""Tensors without values: their form, their memory, and what a host that reads them gets."""

import resource
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from echelon.engine.dry_run.hollow import HollowMemory, is_hollow
from echelon.errors import UserError

LARGE = 2**10


@pytest.fixture(autouse=True)
def _hollow() -> Iterator[None]:
    with HollowMemory():
        yield


def test_large_numbers_have_a_form_and_no_values() -> None:
    one = torch.ones(LARGE, 3)
    product = one.t() @ one.new_zeros(LARGE, 5)
    assert (is_hollow(one), is_hollow(torch.ones(8)), is_hollow(torch.zeros(LARGE, dtype=torch.int64))) == (
        True,
        False,
        False,
    )
    assert product.shape == (3, 5)
    assert one.untyped_storage().nbytes() == LARGE * 3 * 4


def test_nothing_writes_to_large_memory() -> None:
    before = torch.frombuffer(bytearray(b"\x07" * 4 * LARGE), dtype=torch.float32)
    before.normal_().add_(1).zero_()
    torch._foreach_mul_([before, before], 2.0)
    assert bytes(before.untyped_storage()) == b"\x07" * 4 * LARGE  # type: ignore[arg-type]


def test_a_layer_of_16_gib_is_trained() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = nn.Linear(2**15, 2**15)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = F.mse_loss(model(torch.zeros(16, 2**15)), torch.zeros(16, 2**15))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert loss.detach().tolist() == 1
    assert model.weight.grad is not None
    assert model.weight.grad.shape == model.weight.shape
    assert optimizer.state[model.weight]["exp_avg"].nbytes == 2**32
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 2**30


def test_one_tensor_may_be_larger_than_the_machine() -> None:
    large = torch.empty(2**42)
    assert (large + 1).untyped_storage().nbytes() == 2**44


def test_the_host_reads_numbers_that_are_one_and_equal() -> None:
    one, other = torch.ones(LARGE), torch.ones(LARGE)
    assert one.sum().tolist() == 1
    assert one[3].item() == 1
    assert torch.equal(one, other)
    assert bool(one.isfinite().all())
    assert not bool(one.isnan().any())
    assert bool(torch.isclose(one, other).all())
    assert not bool((one == one[:1]).all())  # other elements of one tensor may differ
    assert not bool((one > other).any())
    assert bool((one > 0).all())


def test_flags_that_are_too_many_for_values_are_alike() -> None:
    numbers = torch.ones(2**25)
    assert is_hollow(numbers == numbers)
    assert bool((numbers == numbers).all())
    assert not bool((numbers != numbers).any())
    assert int((torch.zeros(2**22, dtype=torch.int64) != 1).sum()) == 0  # as if each were 1
    assert int((torch.zeros(2**22, dtype=torch.int64) != 2).sum()) == 2**22


def test_small_tensors_and_integers_are_computed() -> None:
    tokens = torch.arange(LARGE).view(2, -1)
    assert int((tokens != 3).sum()) == LARGE - 1
    counts = torch.ones(3) * torch.tensor([1.0, 2.0, 3.0])
    assert counts.tolist() == [1, 2, 3]
    statistics = torch.full((LARGE,), 2.0, dtype=torch.float64)
    assert float(statistics.sum()) == 2 * LARGE


def test_flags_stay_where_nothing_has_values() -> None:
    found = torch.zeros(2)
    found.add_(torch.ones(LARGE).sum() * 0)
    found.copy_(torch.ones(LARGE)[:2])
    assert found.tolist() == [0, 0]


def test_a_choice_is_divided_evenly() -> None:
    scores = torch.ones(32, 8)
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[..., :2]
    assert chosen[:3].tolist() == [[0, 1], [1, 2], [2, 3]]
    assert chosen.flatten().bincount().tolist() == [8] * 8
    assert torch.equal(scores.topk(2).indices, chosen)


def test_bits_of_what_has_no_values_are_zeros() -> None:
    assert torch.ones(LARGE).view(torch.int32).sum().tolist() == 0


def test_rows_that_flags_choose_are_as_many_as_the_flags() -> None:
    rows, flags = torch.ones(LARGE, 4), torch.arange(LARGE) < 5
    assert rows[flags].shape == (5, 4)


def test_what_needs_values_is_refused() -> None:
    with pytest.raises(UserError, match=r"nonzero.* depends on values"):
        torch.ones(LARGE).nonzero()
