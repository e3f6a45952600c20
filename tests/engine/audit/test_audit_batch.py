"""Samples of an audit: one device sees each once, a plan each as often as the others; what is new in them."""

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.collectives.agreement import RankAgreement
from echelon.collectives.mesh import Mesh
from echelon.engine.audit.audit_batch import (
    NUM_TRAITS,
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
    assert not new(real, 1.5 * real)
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


def test_masks_among_the_inputs_count() -> None:
    targets = torch.ones(2, dtype=torch.int64)
    for kind in (torch.bool, torch.int64, torch.float64):
        whole, cut = torch.ones(2, 3, dtype=kind), torch.tensor([[1, 1, 1], [1, 1, 0]]).to(kind)
        assert not torch.equal(traits(targets, whole), traits(targets, cut))
    real = torch.tensor([[0.1, -0.2], [0.1, -0.2]])
    assert torch.equal(traits(targets, -real), traits(targets, real)), "signs of features do not count"
    assert sample_traits((None, None)) is None


def test_each_tensor_has_traits_of_its_own() -> None:
    """A mask beside targets that have zeros themselves."""
    tokens = torch.tensor([[0, 1], [1, 1]])

    def shown(mask: Tensor) -> Tensor:
        found = sample_traits((torch.ones(2, 2), (tokens, mask)))
        assert found is not None
        return shown_traits(found)

    assert (shown(torch.tensor([[1, 1], [1, 0]])) & ~shown(torch.ones(2, 2, dtype=torch.int64))).any()


def test_other_weights_of_samples_and_larger_numbers_are_new() -> None:
    alike = torch.ones(3)
    assert new(alike, torch.tensor([1.0, 1.5, 1.0]))
    real = torch.tensor([1.0, 1.5, -1.0])
    assert not new(real, -real.flip(0))
    assert new(real, torch.tensor([1.0, 2.5, -1.0]))
    assert new(real, torch.tensor([1.0, math.inf, -1.0]))
    assert not new(2 * real, real), "smaller ones are none"


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
    "larger": torch.tensor([0.5, 1.0, -2.0, 300.0]),
    "the same": torch.ones(4, 2),
    "small": torch.tensor([0.01, -0.02, 0.2499, 0.25]),
    "real, with zeros": torch.tensor([0.0, 1.0, 2.0, 3.0]),
    "not numbers": torch.tensor([math.nan, 1.0, 2.0, 3.0]),
    "infinite": torch.tensor([math.inf, 1.0, 2.0, 3.0]),
    "half": torch.tensor([1.0, -1.0, 2.0, 3.0], dtype=torch.bfloat16),
    "bools": torch.tensor([True, False, True, True]),
    "true": torch.tensor([True, True, True, True]),
    "none": torch.zeros(4, 0),
}


@pytest.mark.parametrize("place", ["targets", "inputs", "the second input"])
def test_a_batch_that_is_ruled_out_by_a_look_shows_nothing_new(place: str) -> None:
    def batch_of(name: str) -> tuple[Any, Tensor]:
        features, leaf = torch.ones(4, 7), BATCHES[name]
        if place == "targets":
            return features, leaf
        return (leaf if place == "inputs" else (features, leaf)), torch.ones(4)

    def shown(name: str) -> Tensor:
        traits = sample_traits(batch_of(name))
        assert traits is not None
        return shown_traits(traits)

    num_ruled_out = 0
    for earlier, now in itertools.product(BATCHES, BATCHES):
        known = shown(earlier)
        if shows_known(batch_of(now), known.tolist()):
            assert not (shown(now) & ~known).any(), (earlier, now)
            num_ruled_out += earlier != now
    assert num_ruled_out > 20


PARTLY = {"a class without a sample of it", "ignored", "positions past the end", "not numbers", "infinite"}


@pytest.mark.parametrize("name", sorted(set(BATCHES) - PARTLY))
def test_a_batch_like_the_last_is_ruled_out(name: str) -> None:
    batch = torch.ones(4, 7), BATCHES[name]
    traits = sample_traits(batch)
    assert traits is not None
    assert shows_known(batch, shown_traits(traits).tolist())
    assert not shows_known(batch, torch.zeros(NUM_TRAITS).bool().tolist())


def test_tokens_as_long_as_the_input_are_no_positions() -> None:
    batch = torch.arange(400).view(4, 100), torch.arange(400).view(4, 100) + 1
    traits = sample_traits(batch)
    assert traits is not None
    assert shows_known(batch, shown_traits(traits).tolist())
