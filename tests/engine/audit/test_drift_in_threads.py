"""Which steps compare copies, which ones, and what they say; ranks are threads. Trainings: test_drift.py."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.collectives import Group, RecordingGroup
from echelon.engine.audit.drift import Copies, DriftCheck
from echelon.errors import UserError
from tests.thread_ranks import ThreadGroup, run_threads

CPU = torch.device("cpu")
Weights = dict[str, Tensor]


def mesh_of(group: Group, **groups: Group) -> Any:
    plan = SimpleNamespace(ranks=group.size, sync="all-reduce")
    return SimpleNamespace(
        plan=plan, device=CPU, rank=group.rank, group=({"all": group} | groups).__getitem__
    )


def said(
    check: DriftCheck, steps: Sequence[int], change: Callable[[int], object] = lambda _: None
) -> dict[int, str]:
    """What steps raise, or have found when the next one asks."""
    errors = {}
    for step in steps:
        change(step)
        try:
            check.after_step(step)
        except UserError as error:
            errors[step] = f"raised {error}"
        found = check.error(before=step + 1)
        if found is not None:
            errors[step] = str(found)
    return errors


def drifted(
    weights: Callable[[int], Weights],
    steps: int = 5,
    every: int = 2,
    at: int = -1,
    size: int = 3,
    **options: Any,
) -> list[tuple[dict[int, str], list[int]]]:
    """Each rank's errors, and the steps that moved bytes; rank 1 changes its first weight in step `at`."""

    def run(group: Group) -> tuple[dict[int, str], list[int]]:
        assert isinstance(group, ThreadGroup)
        held = weights(group.rank)
        errors: dict[int, str] = {}
        check = DriftCheck(
            [Copies(lambda: list(held.items()), group, "a cause", **options)], mesh_of(group), every
        )
        talking = []

        def change(step: int) -> None:
            if group.rank == 1 and step == at:
                next(iter(held.values())).add_(1)

        for step in range(steps):
            before = len(group.ledger.moves)
            errors.update(said(check, [step], change))
            if len(group.ledger.moves) > before:
                talking.append(step)
        assert set(group.subjects) <= {"checks"}
        return errors, talking

    return run_threads(size, run)


def same(_: int) -> Weights:
    return {"one": torch.ones(2), "two": torch.ones(3, dtype=torch.int64)}


def test_steps_that_are_multiples_compare_and_no_others() -> None:
    assert drifted(same, steps=7, every=3) == [({}, [0, 3, 6])] * 3
    assert drifted(same, steps=3, every=1) == [({}, [0, 1, 2])] * 3
    assert drifted(same, steps=3, every=0) == [({}, [])] * 3
    assert drifted(same, steps=3, every=1, size=1) == [({}, [])]
    assert drifted(lambda _: {}, steps=1, every=1, size=2) == [({}, [0])] * 2, "all ranks take part"


def test_a_later_difference_is_told_by_all_ranks_once() -> None:
    errors, talking = drifted(same, at=1)[0]
    assert list(errors) == [2, 4]
    assert errors[2].startswith(
        "after step 3 rank 0 and rank 1 hold different values of one, of which each must"
    )
    assert errors[2].endswith(
        "a cause; fix that, and start again from a checkpoint of before; check_every=1 finds the step"
    )
    assert errors[4].startswith("after step 5 ")
    assert talking == [0, 2, 4]


def test_the_first_comparison_raises() -> None:
    def weights(rank: int) -> Weights:
        return {
            "zero": torch.ones(1),
            "one": torch.full((2,), float(rank > 0)),
            "two": torch.full((1,), float(rank)),
        }

    ((errors, _), *_) = drifted(weights, steps=1)
    assert errors[0].startswith(
        "raised after step 1 rank 0 and ranks 1, 2 hold different values of one (and 1 more), of"
    )


def test_one_that_starts_late_starts_with_the_next_multiple() -> None:
    def run(group: Group) -> list[int]:
        check = DriftCheck([Copies(lambda: [("a", torch.ones(1))], group, "")], mesh_of(group), 4)
        steps = []
        for step in (5, 6, 7, 8, 9, 12):
            before = len(group.ledger.moves)
            check.after_step(step)
            steps += [step] if len(group.ledger.moves) > before else []
        return steps

    assert run_threads(2, run) == [[5, 8, 12]] * 2


def test_what_was_found_is_told_to_a_later_step_alone() -> None:
    def run(group: Group) -> list[bool]:
        held = torch.zeros(1)
        check = DriftCheck([Copies(lambda: [("a", held)], group, "")], mesh_of(group), 1)
        answers = [check.error(before=9) is None]
        check.after_step(0)
        held += group.rank
        check.after_step(1)
        return [*answers, *(check.error(before=before) is None for before in (1, 2, 3))]

    assert run_threads(2, run) == [[True, True, False, True]] * 2


def test_rounding_may_differ_where_copies_are_not_exact() -> None:
    def weights(shift: float) -> Callable[[int], Weights]:
        return lambda rank: {"one": torch.full((100,), 1 + rank * shift), "two": torch.ones(1)}

    assert drifted(weights(1e-6), steps=1, size=2, exact=False) == [({}, [0])] * 2
    assert drifted(weights(1e-6), steps=1, size=2, exact=True)[0][0]
    (errors, _), _ = drifted(weights(1e-2), steps=1, size=2, exact=False)
    assert "rank 0 and rank 1 hold different values of one, of" in errors[0]
    huge = torch.full((2,), 1e200, dtype=torch.float64)  # whose measures are infinite
    assert drifted(lambda _: {"one": huge}, steps=1, size=2, exact=False) == [({}, [0])] * 2
    half = {"one": torch.ones(4, dtype=torch.bfloat16), "two": torch.ones(1)}  # the coarsest type decides
    assert (
        drifted(lambda rank: half | {"two": torch.ones(1) + rank * 1e-3}, 1, size=2, exact=False)
        == [({}, [0])] * 2
    )


def test_a_rank_without_copies_hears_of_those_of_others() -> None:
    """As one of a stage that has no replicas; its copies are of a group of one, which is not asked."""

    def run(group: Group) -> str:
        alone, differing = RecordingGroup("data"), [("a", torch.full((1,), float(group.rank)))]
        copies = [Copies(lambda: differing, alone, "nothing"), Copies(lambda: differing, group, "a cause")]
        with pytest.raises(UserError) as caught:
            DriftCheck(copies, mesh_of(group), 1).after_step(0)
        return str(caught.value)

    first, other = run_threads(2, run)
    assert first == other
    assert "rank 0 and rank 1 hold different values of a, of" in first
    assert ": a cause;" in first
