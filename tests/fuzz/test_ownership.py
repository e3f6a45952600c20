"""The property of ownership can fail: each error of a list is found."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from echelon.launching import Ranks
from echelon.plan import Plan
from echelon.state.ownership import ENGINE, MASTER, VALUE, OwnedSlice, Slice
from echelon.verify import Case, verify
from tests.cases import adamw, eleven_vectors, mean_loss, perceptron_case
from tests.fuzz.ownership import RecordingRanks, counter_errors, ownership_errors

WEIGHT, STEP = torch.arange(8.0).view(4, 2), torch.tensor(3.0)
STATE = {("w", VALUE): WEIGHT, ("w", "step"): STEP, ("b", VALUE): torch.ones(2)}

Lists = list[list[OwnedSlice]]


def rows(begin: int, end: int) -> OwnedSlice:
    return OwnedSlice(Slice("w", VALUE, (4, 2), (begin, 0), (end - begin, 2)), WEIGHT[begin:end].clone())


def lists() -> Lists:
    """Two ranks that hold half of a matrix each, and the rest both."""
    both = [
        OwnedSlice(Slice("w", "step", (), (), ()), STEP.clone()),
        OwnedSlice(Slice("b", VALUE, (2,), (0,), (2,)), torch.ones(2)),
    ]
    return [[rows(0, 2), *both], [rows(2, 4), *both]]


def test_state_that_is_held_once_or_by_several_ranks_has_no_error() -> None:
    assert list(ownership_errors(lists(), STATE)) == []


CHANGES: dict[str, tuple[Callable[[Lists], Any], str]] = {
    "elements are missing": (
        lambda ranks: ranks[1].__setitem__(0, rows(3, 4)),
        "2 elements are held by no rank",
    ),
    "a tensor is missing": (lambda ranks: [owned.pop() for owned in ranks], "no rank owns b value"),
    "slices overlap": (lambda ranks: ranks[1].__setitem__(0, rows(1, 4)), "2 elements are in several slices"),
    "values differ": (
        lambda ranks: ranks[1][0].tensor.add_(1),
        "w value: a rank holds other values at (2, 0)",
    ),
    "replicas differ": (
        lambda ranks: ranks[1].__setitem__(2, ranks[1][2]._replace(tensor=torch.zeros(2))),
        "b value: a rank holds other values at (0,)",
    ),
    "another type": (
        lambda ranks: ranks[0].__setitem__(0, ranks[0][0]._replace(tensor=WEIGHT[:2].double())),
        "(2, 2) of torch.float32 is held as (2, 2) of torch.float64",
    ),
    "memory of another shape": (
        lambda ranks: ranks[0].__setitem__(0, ranks[0][0]._replace(tensor=WEIGHT[:2].flatten())),
        "is held as (4,)",
    ),
    "another global shape": (
        lambda ranks: ranks[0].append(OwnedSlice(Slice("b", VALUE, (3,), (0,), (3,)), torch.ones(3))),
        "a slice of shape (3,), where the state has (2,)",
    ),
    "too much": (
        lambda ranks: ranks[0].append(OwnedSlice(Slice("b", MASTER, (2,), (0,), (2,)), torch.ones(2))),
        "b master is owned, and is no part of the state",
    ),
}


@pytest.mark.parametrize(("change", "error"), [pytest.param(*row, id=key) for key, row in CHANGES.items()])
def test_each_error_is_found(change: Callable[[Lists], Any], error: str) -> None:
    ranks = lists()
    change(ranks)
    assert error in "\n".join(ownership_errors(ranks, STATE))


def counters(steps: int, seed: int = 0) -> list[OwnedSlice]:
    values = {"steps": steps, "seed": seed}
    return [
        OwnedSlice(Slice(ENGINE, part, (), (), ()), torch.tensor(value)) for part, value in values.items()
    ]


def test_counters_must_be_on_every_rank_and_agree() -> None:
    case = perceptron_case(steps=3)
    assert list(counter_errors([counters(3), counters(3)], case)) == []
    assert "steps must be 3" in "\n".join(counter_errors([counters(3), counters(2)], case))
    assert "steps must be 3 on 2 ranks" in "\n".join(counter_errors([counters(3), []], case))
    assert "seed must be 0" in "\n".join(counter_errors([counters(3, seed=1)], case))
    versions = [[OwnedSlice(Slice(ENGINE, "version", (), (), ()), torch.tensor(n))] for n in (5, 6)]
    assert "version differs" in "\n".join(counter_errors([counters(3) + v for v in versions], case))


class Normalized(torch.nn.Module):
    """Two layers, one of which has buffers that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            torch.nn.Linear(6, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Linear(8, 5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.norm(self.first(x)))
        return output


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases(
    "bf16-data=2 sync=async staleness=0",
    "bf16-data=2 zero=3",
    "bf16-data=2",
    "bf16-data=4 zero=3 shard=2",
    "fp16-data=2 sync=async staleness=0",
    "fp16-data=2 zero=3",
    "fp16-data=2",
    "fp16-data=4 zero=3 shard=2",
    "fp64-data=2 zero=3",
)
@pytest.mark.parametrize(
    "plan", ["data=2", "data=2 zero=3", "data=4 zero=3 shard=2", "data=2 sync=async staleness=0"]
)
@pytest.mark.parametrize("precision", ["fp64", "bf16", "fp16"])
def test_real_engines_own_the_whole_state(
    warm_ranks: Callable[[int], Ranks], plan: str, precision: Any
) -> None:
    recording = RecordingRanks(warm_ranks(Plan.parse(plan).ranks))
    verify(perceptron_case(eleven_vectors, steps=2), plan, precision=precision, ranks=recording)
    assert recording.errors == []


def test_buffers_are_owned_too(warm_ranks: Callable[[int], Ranks]) -> None:
    recording = RecordingRanks(warm_ranks(2))
    case = Case(Normalized, eleven_vectors, mean_loss, adamw, steps=2)
    assert verify(case, "data=2", ranks=recording).equal  # statistics are of the whole batch
    assert recording.errors == []
