"""What samples show, and which of them an audit takes."""

import math

import torch
from torch import Tensor

from echelon.engine.audit.batch_traits import most_different, sample_traits, union


def traits(targets: Tensor, inputs: Tensor | None = None) -> list[int]:
    found = sample_traits((torch.zeros(len(targets), 4) if inputs is None else inputs, targets))
    assert found is not None
    return found.tolist()


def new(first: Tensor, later: Tensor) -> bool:
    """Whether a later batch shows what the first did not."""
    known, shown = (int(union(torch.tensor(traits(each)))) for each in (first, later))
    return bool(shown & ~known)


def test_what_is_new() -> None:
    plain = torch.tensor([[1, 2], [2, 1]])
    assert not new(plain, plain.flip(0))
    for value in (-100, -1, 0, 3, 39):
        assert new(plain, torch.tensor([[1, 2], [2, value]]))
    real = torch.ones(3, 2)
    assert not new(real, 2 * real)
    for number in (0.0, -1.0, math.nan):
        assert new(real, torch.tensor([[1.0, 1.0], [1.0, number], [1.0, 1.0]]))
        assert new(real[:1], torch.tensor([[1.0, number]])), "also where a replica has one sample"
    padded = torch.tensor([[True, False], [True, False]])
    assert not new(padded, padded.clone())
    assert new(padded, torch.tensor([[True, False], [False, False]]))


def test_positions_past_the_end_of_the_input() -> None:
    inside, past = torch.tensor([1, 2]), torch.tensor([1, 42])  # the same remainder by 40
    assert not new(torch.tensor([1, 2]), inside)
    assert new(inside, past)


def test_masks_among_the_inputs_count_and_real_inputs_do_not() -> None:
    targets = torch.ones(2, dtype=torch.int64)
    whole, cut = torch.ones(2, 3, dtype=torch.bool), torch.tensor([[True] * 3, [True, True, False]])
    assert traits(targets, whole) != traits(targets, cut)
    assert traits(targets, torch.ones(2, 3)) == traits(targets, torch.tensor([[1.0] * 3, [0.0] * 3]))
    assert sample_traits((torch.ones(2, 3), None)) is None


def test_samples_are_ordered_by_what_is_new() -> None:
    targets = torch.tensor([[1, 1, 1], [5, 5, 1], [1, 1, 1], [5, 1, 1], [5, 5, 5], [1, 1, 1]])
    batch = (torch.zeros(6, 2), targets)
    known = int(union(torch.tensor(traits(torch.ones(1, 3, dtype=torch.int64)))))
    assert most_different(batch, sample_traits(batch), 4, known) == [0, 2, 1, 4]
    assert most_different(batch, None, 2) == [0, 1]


def test_an_empty_batch_shows_nothing() -> None:
    assert int(union(torch.zeros(0, dtype=torch.int64))) == 0
