"""Samples of an audit: one device sees each once, a plan each as often as the others."""

from collections import Counter
from typing import Any

import pytest
import torch

from echelon.collectives.agreement import RankAgreement
from echelon.collectives.mesh import Mesh
from echelon.engine.audit.audit_batch import GivenBatch, choose_samples, smallest_factor
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
    chosen = choose_samples(given(batch), None, 0, 0, mesh, agreement)
    assert chosen is not None
    assert chosen.whole[0].tolist() == whole
    assert chosen.local[1].tolist() == [10 * sample for sample in local]
    assert len(set(Counter(local).values())) == 1
    parts = [chosen.local[0][n * chosen.per_part].item() for n in range(len(chosen.places))]
    assert [chosen.whole[0][place].item() for place in chosen.places] == parts


def test_whole_microbatches_where_a_model_takes_no_others() -> None:
    mesh, agreement = Mesh.pretend(Plan.parse("microbatches=2"), 0), RankAgreement(None, torch.device("cpu"))
    chosen = choose_samples(given((torch.arange(8), None)), None, 0, 0, mesh, agreement, is_small=False)
    assert chosen is not None
    assert chosen.per_part == 4
    assert chosen.bounds == [(0, 4), (4, 8)]
    assert chosen.part(1)[0].tolist() == [4, 5, 6, 7]


def test_without_samples_there_is_nothing() -> None:
    mesh, agreement = Mesh.pretend(Plan.parse("microbatches=2"), 0), RankAgreement(None, torch.device("cpu"))
    assert choose_samples(given((torch.zeros(0, 2), None)), None, 0, 0, mesh, agreement) is None


def test_smallest_factors() -> None:
    assert [smallest_factor(number) for number in (1, 2, 3, 4, 9, 15, 7)] == [1, 2, 3, 2, 3, 3, 7]
