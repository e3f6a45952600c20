"""Several stages of one rank as one: what is asked of all goes to all, what is one's to that one."""

import pytest
import torch
from torch import Tensor, nn

from echelon.data_parallel import Several
from echelon.data_parallel.sync import Alone


def two() -> tuple[nn.Linear, nn.Linear, Several]:
    first, second = nn.Linear(2, 3), nn.Linear(3, 1)
    return first, second, Several([Alone(first), Alone(second)])


def test_it_holds_what_its_parts_hold_in_order() -> None:
    first, second, several = two()
    expected = [*first.parameters(), *second.parameters()]
    assert all(p is q for p, q in zip(several.parameters(), expected, strict=True))
    assert [held.tensor.shape for held in several.held()] == [p.shape for p in expected]
    assert len(several.owned()) == 4


def test_slices_are_those_of_the_part_that_holds_them() -> None:
    _, second, several = two()
    held = several.held()[2]
    assert held.parameter is second.weight
    assert [its.shape for its in several.slices(held)] == [(1, 3)]


def test_a_step_starts_without_gradients_in_all_parts() -> None:
    first, second, several = two()
    second(first(torch.ones(1, 2))).sum().backward()
    squares = sum(float(g.square().sum()) for g in several.norm_share())
    assert squares == pytest.approx(sum(float(p.grad.square().sum()) for p in several.parameters()))
    assert len(several.norm_share(without={first.weight})) == 3
    assert len(several.storages().gradients) == 4
    several.start_step()
    assert all(parameter.grad is None for parameter in several.parameters())
    assert several.storages().gradients == []


def test_new_memory_for_all_parts() -> None:
    _, _, several = two()
    before: list[Tensor] = [p.data for p in several.parameters()]
    several.renew()
    for old, parameter in zip(before, several.parameters(), strict=True):
        assert old.data_ptr() != parameter.data_ptr()
        assert torch.equal(old, parameter.data)


def test_a_backward_pass_is_one_part_s() -> None:
    _, _, several = two()
    with pytest.raises(AssertionError, match="one part's"):
        several.start_backward(last=True)
    with pytest.raises(AssertionError, match="one part's"):
        several.finish_backward()


def test_it_is_sharded_or_in_lockstep_when_a_part_is() -> None:
    parts = [Alone(nn.Linear(1, 1)), Alone(nn.Linear(1, 1))]
    assert (Several(parts).sharded, Several(parts).lockstep) == (False, False)
    parts[1].sharded = parts[1].lockstep = True
    assert (Several(parts).sharded, Several(parts).lockstep) == (True, True)
