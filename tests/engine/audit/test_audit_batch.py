"""Samples of an audit: one device sees each once, a plan each as often as the others; what is new in them."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.collectives.agreement import RankAgreement
from echelon.collectives.mesh import Mesh
from echelon.engine.audit.audit_batch import (
    GivenBatch,
    choose_samples,
    most_different,
    sample_traits,
    shown_traits,
    shows_known,
    smallest_factor,
)
from echelon.plan import Plan


def given(batch: Any) -> GivenBatch:
    return GivenBatch(batch, batch, lambda read: read)


@pytest.mark.parametrize(
    ("plan", "samples", "whole", "local"),
    [
        ("data=1", 8, [0, 1], [0, 1]),
        ("microbatches=2", 8, [0, 1, 2, 3], [0, 1, 2, 3]),
        ("microbatches=4", 8, [0, 1, 2, 3], [0, 1, 2, 3, 0, 1, 2, 3]),
        ("microbatches=3", 9, [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
        ("microbatches=4", 4, [0, 1], [0, 1, 0, 1]),
        ("microbatches=4", 2, [0, 1], [0, 1]),
        ("schedule=pipedream microbatches=2", 8, [0, 1], [0, 1, 0, 1]),
        ("data=1", 1, [0], [0]),
    ],
)
def test_each_sample_is_repeated_as_often(plan: str, samples: int, whole: Any, local: Any) -> None:
    mesh = Mesh.pretend(Plan.parse(plan), 0)
    batch = (torch.arange(samples), torch.arange(samples) * 10)
    agreement = RankAgreement(None, torch.device("cpu"))
    chosen = choose_samples(given(batch), None, None, 0, mesh, agreement)
    assert chosen is not None
    assert chosen.whole[0].tolist() == whole
    assert chosen.local[1].tolist() == [10 * sample for sample in local]
    assert len(set(Counter(local).values())) == 1
    parts = [chosen.local[0][n * chosen.per_part].item() for n in range(len(chosen.places))]
    assert [chosen.whole[0][place].item() for place in chosen.places] == parts


def test_whole_microbatches_where_a_model_takes_no_others() -> None:
    mesh, agreement = Mesh.pretend(Plan.parse("microbatches=2"), 0), RankAgreement(None, torch.device("cpu"))
    chosen = choose_samples(given((torch.arange(8), None)), None, None, 0, mesh, agreement, is_small=False)
    assert chosen is not None
    assert chosen.per_part == 4
    assert chosen.bounds == [(0, 4), (4, 8)]
    assert chosen.part(1)[0].tolist() == [4, 5, 6, 7]


def test_without_samples_there_is_nothing() -> None:
    mesh, agreement = Mesh.pretend(Plan.parse("microbatches=2"), 0), RankAgreement(None, torch.device("cpu"))
    assert choose_samples(given((torch.zeros(0, 2), None)), None, None, 0, mesh, agreement) is None


def test_smallest_factors() -> None:
    assert [smallest_factor(number) for number in (1, 2, 3, 4, 9, 15, 7)] == [1, 2, 3, 2, 3, 3, 7]


def traits(targets: Tensor, inputs: Tensor | None = None) -> Tensor:
    found = sample_traits((torch.zeros(len(targets), 4) if inputs is None else inputs, targets))
    assert found is not None
    return found


def new(first: Tensor, later: Tensor) -> bool:
    """Whether a later batch shows what the first did not."""
    return bool((shown_traits(traits(later)) & ~shown_traits(traits(first))).any())


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
    assert not torch.equal(traits(targets, whole), traits(targets, cut))
    real = torch.tensor([[1.0] * 3, [0.0] * 3])
    assert torch.equal(traits(targets, torch.ones(2, 3)), traits(targets, real))
    assert sample_traits((torch.ones(2, 3), None)) is None


def test_samples_are_ordered_by_what_is_new() -> None:
    targets = torch.tensor([[1, 1, 1], [5, 5, 1], [1, 1, 1], [5, 1, 1], [5, 5, 5], [1, 1, 1]])
    found = traits(targets)
    new = shown_traits(found) & ~shown_traits(traits(torch.ones(1, 3, dtype=torch.int64)))
    assert most_different(found, new, 4) == [0, 2, 1, 4]
    zeros = traits(torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 1.0]]))
    assert most_different(zeros, torch.zeros_like(new), 2) == [1, 2], "nothing is new"


def test_an_empty_batch_shows_nothing() -> None:
    assert not shown_traits(traits(torch.zeros(0, dtype=torch.int64))).any()


BATCHES = {
    "classes": torch.arange(4),
    "a class without a sample of it": torch.tensor([1, 3, 3, 1]),
    "a large vocabulary": torch.arange(200).view(4, 50) + 1,
    "ignored": torch.tensor([1, -100, 2, 3]),
    "positions past the end": torch.tensor([5, 7, 8, 9]),
    "real": torch.tensor([0.5, 1.0, 2.0, 3.0]),
    "real, with zeros": torch.tensor([0.0, 1.0, 2.0, 3.0]),
    "not numbers": torch.tensor([math.nan, 1.0, 2.0, 3.0]),
    "half": torch.tensor([1.0, -1.0, 2.0, 3.0], dtype=torch.bfloat16),
    "bools": torch.tensor([True, False, True, True]),
    "none": torch.zeros(4, 0),
}


@pytest.mark.quick_cases(60)
@pytest.mark.parametrize("earlier", BATCHES)
@pytest.mark.parametrize("now", BATCHES)
@pytest.mark.parametrize("place", ["targets", "inputs"])
def test_a_batch_that_is_ruled_out_by_its_range_shows_nothing_new(earlier: str, now: str, place: str) -> None:
    def batch_of(name: str) -> tuple[Any, Tensor]:
        features, leaf = torch.ones(4, 7), BATCHES[name]
        return (features, leaf) if place == "targets" else ((features, leaf), torch.ones(4))

    def shown(name: str) -> Tensor:
        traits = sample_traits(batch_of(name))
        assert traits is not None
        return shown_traits(traits)

    known = shown(earlier)
    if shows_known(batch_of(now), known.tolist()):
        assert not (shown(now) & ~known).any()


def test_the_range_of_a_batch_like_the_last_rules_out_new_traits() -> None:
    batch = torch.ones(4, 7), BATCHES["classes"]
    traits = sample_traits(batch)
    assert traits is not None
    known = shown_traits(traits).tolist()
    assert shows_known(batch, known)
    assert not shows_known((batch[0], torch.tensor([0, 1, 2, 4])), known)
    assert not shows_known((batch[0], torch.tensor([0, 1, 2, -1])), known)
    assert not shows_known((batch[0], torch.tensor([0.0, 1.0, 2.0, math.nan])), known)
