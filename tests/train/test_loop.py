"""The loop, as every rank runs it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.launching import Ranks
from echelon.train import loop
from echelon.train.events import Evaluated, Event, Stepped
from echelon.train.job import Job, ModelJob


def train_and_count(job: Job, folder: Path) -> tuple[int, int, list[Event]]:
    """How many Stepped events this rank computed, and what it told."""
    computed, events = 0, list[Event]()
    compute = loop._stepped

    def count(*arguments: object) -> Stepped:
        nonlocal computed
        computed += 1
        return compute(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_stepped", count)
        loop.train_rank(job, folder, events.append)
    return computed, len(events), [event for event in events if isinstance(event, Stepped | Evaluated)]


def test_rank_0_alone_computes_and_tells(tmp_path: Path, warm_ranks: Callable[[int], Ranks]) -> None:
    # Every rank measured its memory and summed its ledger in every step, for nobody.
    model = ModelJob(layers=1, width=32, heads=2)
    job = Job(steps=3, batch=4, sequence=16, evaluate_batches=1, model=model)
    first, second = warm_ranks(2).run(train_and_count, job, tmp_path)
    assert second == (0, 0, [])
    assert first[:2] == (3, 6)
    *steps, evaluated = first[2]
    assert [event.step for event in steps] == [1, 2, 3]
    assert evaluated.step == 3
    for step in steps:
        assert 0 <= step.comm_hidden_seconds <= step.comm_seconds <= step.seconds
        assert step.memory_bytes > 0
