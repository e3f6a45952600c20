"""Batches depend on (seed, step) alone, and each epoch visits each window once."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.data import Batches, Corpus, open_corpus
from echelon.data.sampler import shuffle
from echelon.errors import UserError


def counting(length: int) -> Corpus:
    """A corpus whose tokens are their own places, so that a batch shows where it was read."""
    return Corpus(np.arange(length, dtype=np.uint32), length, "counting")


def starts(batches: Batches, steps: range) -> list[int]:
    return [start for step in steps for start in batches.at(step)[0][:, 0].tolist()]


def test_shuffle_literally() -> None:
    # Runs that were saved must go on: this order is a promise.
    assert shuffle(np.arange(10), 10, seed=0, epoch=0).tolist() == [5, 3, 6, 9, 1, 0, 4, 2, 8, 7]
    assert shuffle(np.arange(10), 10, seed=0, epoch=1).tolist() == [1, 2, 5, 8, 9, 0, 6, 7, 4, 3]


@settings(deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 10**6))
def test_shuffle_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    assert sorted(shuffle(np.arange(n), n, seed, epoch).tolist()) == list(range(n))


@settings(deadline=None)
@given(n=st.integers(10**6, 2**60), first=st.integers(0, 10**6 - 100))
def test_shuffle_of_a_huge_corpus_keeps_apart_and_in_range(n: int, first: int) -> None:
    moved = shuffle(np.arange(first, first + 100), n, seed=1, epoch=2)
    assert len(set(moved.tolist())) == 100
    assert 0 <= moved.min() <= moved.max() < n


def chi_square(counts: Any, degrees: int) -> float:
    """About 1 where the counts are as even as chance makes them."""
    expected = counts.mean()
    return float(((counts - expected) ** 2 / expected).sum() / degrees)


def test_order_is_as_even_as_chance() -> None:
    # Four rounds of the network give 15 for the distances: a weak mix cannot hide here.
    n, epochs = 100, 2000
    orders = np.array([shuffle(np.arange(n), n, seed=0, epoch=epoch) for epoch in range(epochs)])
    reached = np.array([np.bincount(orders[:, place], minlength=n) for place in range(n)])
    assert chi_square(reached, (n - 1) ** 2) < 1.2
    distances = np.bincount((np.diff(orders) % n).ravel())[1:]
    assert chi_square(distances, n - 2) < 1.5


def test_targets_are_the_inputs_one_on() -> None:
    inputs, targets = Batches(counting(1000), batch=4, sequence=10, seed=0).at(3)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (4, 10)
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(10))


def test_each_epoch_visits_each_window_once_in_another_order() -> None:
    # 950 training tokens: 94 windows of 10+1, so batches of 4 straddle the epochs.
    batches = Batches(counting(1000), batch=4, sequence=10, seed=0)
    assert (batches.tokens, batches.windows) == (950, 94)
    seen = starts(batches, range(47))
    first, second = seen[:94], seen[94:]
    assert sorted(first) == sorted(second) == list(range(0, 940, 10))
    assert first != second
    assert first != sorted(first)


def test_another_seed_gives_another_order() -> None:
    batches = Batches(counting(1000), batch=4, sequence=10, seed=0)
    assert starts(batches, range(5)) != starts(replace(batches, seed=1), range(5))


def test_resumed_run_sees_what_the_uninterrupted_one_sees() -> None:
    def fresh() -> Batches:
        return Batches(open_corpus("stdlib", vocab=256), batch=6, sequence=32, seed=7)

    uninterrupted = fresh()
    expected = [uninterrupted.at(step) for step in range(10)]
    resumed = fresh()
    for step in range(6, 10):
        for tensor, reference in zip(resumed.at(step), expected[step], strict=True):
            assert torch.equal(tensor, reference)


@settings(deadline=None)
@given(
    batch=st.integers(1, 30),
    sequence=st.integers(1, 12),
    parts=st.integers(1, 12),
    step=st.integers(0, 10**9),
)
def test_parts_make_the_whole(batch: int, sequence: int, parts: int, step: int) -> None:
    batches = Batches(counting(2000), batch, sequence, seed=3)
    expected = batches.at(step)
    pieces = [batches.at(step, part=(index, parts)) for index in range(parts)]
    for side in (0, 1):
        assert torch.equal(torch.cat([piece[side] for piece in pieces]), expected[side])
    lengths = [len(piece[0]) for piece in pieces]
    assert lengths == [len(rows) for rows in np.array_split(np.arange(batch), parts)]


def test_part_reads_only_its_own_rows() -> None:
    class Watched(Corpus):
        read: tuple[int, ...] = ()

        def windows(self, starts: Any, length: int) -> Any:
            object.__setattr__(self, "read", starts.shape)
            return super().windows(starts, length)

    corpus = Watched(np.arange(1000, dtype=np.uint32), 1000, "watched")
    Batches(corpus, batch=5, sequence=10, seed=0).at(0, part=(1, 2))
    assert corpus.read == (2,)


@settings(deadline=None)
@given(
    length=st.integers(300, 2000),
    fraction=st.floats(0.2, 0.8),
    sequence=st.integers(1, 20),
)
def test_no_token_is_in_both_splits(length: int, fraction: float, sequence: int) -> None:
    train = Batches(counting(length), 1, sequence, seed=0, validation_fraction=fraction)
    validation = replace(train, split="validation")
    assert train.tokens + validation.tokens == length

    # A batch as large as the epoch shows every window of the split.
    train_inputs, train_targets = replace(train, batch=train.windows).at(0)
    inputs, targets = replace(validation, batch=validation.windows).at(0)
    assert train_inputs.min() == 0
    assert train_targets.max() < train.tokens == inputs.min()
    assert targets.max() < length


def test_fraction_is_not_cut_by_floating_point() -> None:
    # 100 times 0.29 is 28.999999999999996.
    assert Batches(counting(100), 1, 1, 0, "validation", 0.29).tokens == 29


def test_every_error_of_the_arguments_at_once() -> None:
    with pytest.raises(UserError) as caught:
        Batches(counting(100), 0, -1, True, "valid", 1.0)  # type: ignore[arg-type]
    assert [error.split(":")[0] for error in caught.value.errors] == [
        "batch=0",
        "sequence=-1",
        "seed=True",
        "split 'valid' is not known (did you mean 'validation'?)",
        "validation_fraction=1.0",
    ]


def test_too_short_for_training() -> None:
    Batches(counting(81), 8, 10, 0, validation_fraction=0)
    with pytest.raises(UserError) as caught:
        Batches(counting(80), 8, 10, 0, validation_fraction=0)
    (error,) = caught.value.errors
    assert "the train split has 80 tokens" in error
    assert "one batch (8 × 10 + 1) needs 81" in error
    assert "lower the batch to 7; or shorten" in error


def test_too_short_for_training_because_of_validation() -> None:
    with pytest.raises(UserError, match="or lower validation_fraction"):
        Batches(counting(81), 8, 10, 0)


def test_too_short_for_validation_names_a_fraction_that_is_enough() -> None:
    with pytest.raises(UserError) as caught:
        Batches(counting(1000), 8, 10, 0, "validation")
    (error,) = caught.value.errors
    assert "the validation split has 50 tokens" in error
    assert "lower the batch to 4; or raise validation_fraction to 0.081;" in error
    assert Batches(counting(1000), 8, 10, 0, "validation", 0.081).windows == 8
    assert Batches(counting(1000), 4, 10, 0, "validation").windows == 4


@pytest.mark.parametrize("length", [0, 1, 5])
def test_corpus_without_one_window(length: int) -> None:
    with pytest.raises(UserError, match="shorten the sequence, or use a larger corpus"):
        Batches(counting(length), 1, 10, 0)
    with pytest.raises(UserError, match="needs 11: shorten the sequence"):
        Batches(counting(length), 1, 10, 0, "validation")


@pytest.mark.parametrize("part", [(2, 2), (-1, 2), (0, 0)])
def test_step_and_part_out_of_range(part: tuple[int, int]) -> None:
    with pytest.raises(UserError) as caught:
        Batches(counting(100), 2, 10, 0).at(-1, part=part)
    assert ["step=-1" in caught.value.errors[0], "part=" in caught.value.errors[1]] == [True, True]
