"""The ways into split parts of a layer: how often ranks talk there. Nothing is moved; the ledger tells."""

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import Ledger, RecordingGroup, Reduction, Work
from echelon.parallel.tensor.modules import Column
from echelon.parallel.tensor.regions import Region


def region(*, sequence: bool = False) -> Region:
    return Region(RecordingGroup("tensor", 0, 2, Ledger()), sequence=sequence)


def columns(region: Region, *, bias: bool = True) -> list[Column]:
    return [Column(nn.Linear(4, 4, bias=bias), region) for _ in range(3)]


def operations(region: Region) -> list[str]:
    return [move.operation for move in region.group.ledger.moves]


def hidden() -> Tensor:
    """As a norm leaves them: no leaf of the graph."""
    return torch.randn(2, 6, 4, requires_grad=True) * 2


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("sequence", "talk"), [(False, ["all_reduce"]), (True, ["all_gather", "reduce_scatter"])]
)
def test_columns_of_the_same_hidden_states_talk_once(*, bias: bool, sequence: bool, talk: list[str]) -> None:
    """Nothing but the way in itself held on to it, and without `sequence` it was gone after the query: query,
    key and value then summed their gradients one by one, three times the bytes."""
    here, x = region(sequence=sequence), hidden()
    query, key, value = (column(x) for column in columns(here, bias=bias))
    (query * key * value).sum().backward()
    assert operations(here) == talk


def test_columns_gather_once_without_gradients_too() -> None:
    here = region(sequence=True)
    with torch.no_grad():
        x = hidden()
        for column in columns(here):
            column(x)
    assert operations(here) == ["all_gather"]


def test_what_was_changed_meanwhile_enters_anew() -> None:
    here, x = region(sequence=True), hidden()
    first = here.enter(x)
    assert here.enter(x) is first
    x.mul_(2)
    second = here.enter(x)
    assert second is not first
    with torch.no_grad():
        assert here.enter(x) is not second


@pytest.mark.parametrize("sequence", [False, True])
def test_what_entered_goes_with_its_source(*, sequence: bool) -> None:
    here, x = region(sequence=sequence), hidden()
    entered = weakref.ref(here.enter(x))
    assert entered() is not None
    del x
    assert entered() is None


def test_a_region_is_copied_without_what_entered() -> None:
    here, x = region(), hidden()
    entered = here.enter(x)
    assert copy.deepcopy(here).enter(x) is not entered
    assert here.enter(x) is entered


class Doubling(RecordingGroup):  # type: ignore[misc] # final: for all but this test
    """Doubles what it sums, as two equal ranks would."""

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        tensor.mul_(2)
        return super()._all_reduce(tensor, op)


@pytest.mark.parametrize("to_matrices", [True, False])
def test_gradients_of_others_are_not_summed_in_their_memory(*, to_matrices: bool) -> None:
    """What adds passes one and the same gradient to both of its terms; a matrix makes its own."""
    here = Region(Doubling("tensor", 0, 2, Ledger()), sequence=False)
    x, other, weight = (torch.randn(3, 3, requires_grad=True) for _ in range(3))
    term = other * 1.0  # made before the entry, so that its backward pass comes after that of the entry
    entered = here.enter(x, to_matrices=to_matrices)
    scale = torch.arange(9.0).view(3, 3)
    output = torch.nn.functional.linear(entered, weight) if to_matrices else entered + term
    (output * scale).sum().backward()
    plain = scale @ weight.detach() if to_matrices else scale
    torch.testing.assert_close(x.grad, 2 * plain)
    if not to_matrices:
        torch.testing.assert_close(other.grad, scale)
