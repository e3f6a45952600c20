"""The loop, as every rank runs it."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.collectives import Move, Traffic
from echelon.launching import Ranks
from echelon.launching.watch import pulse
from echelon.models import load_hf
from echelon.nn.layering import called_layers
from echelon.train import loop, task
from echelon.train.events import Evaluated, Event, Sampled, Stepped
from echelon.train.jobs.job import Job, ModelJob, OptimizerJob
from echelon.update.optim.optimizers import make_optimizer
from tests.cases import Perceptron, adamw, mean_loss, vectors


def train_and_count(job: Job, folder: Path) -> tuple[int, int, list[Event]]:
    """Of how many steps this rank kept a record, and what it told."""
    computed, events = 0, list[Event]()
    compute = loop.report_of

    def count(*arguments: object) -> object:
        nonlocal computed
        computed += 1
        return compute(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "report_of", count)
        loop.train_rank(job, folder, events.append)
    return computed, len(events), [event for event in events if isinstance(event, Stepped | Evaluated)]


def test_rank_0_alone_computes_and_tells(tmp_path: Path, warm_ranks: Callable[[int], Ranks]) -> None:
    # Every rank measured its memory and summed its ledger in every step, for nobody.
    model = ModelJob(layers=1, width=32, heads=2)
    job = Job(steps=3, batch=4, sequence=16, evaluate_batches=1, model=model)
    first, second = warm_ranks(2).run(train_and_count, job, tmp_path)
    assert second == (0, 0, [])
    assert first[:2] == (3, 9)  # beside steps: the start, the audit, what ranks hold, the end
    *steps, evaluated = first[2]
    assert [event.step for event in steps] == [1, 2, 3]
    assert evaluated.step == 3
    for step in steps:
        assert 0 <= step.comm_hidden_seconds <= step.comm_seconds <= step.seconds
        assert step.memory_bytes > 0


def train_job_and_engine(job: Job, folder: Path) -> tuple[list[dict[str, Tensor]], list[object]]:
    """The weights and averages of an engine with the keys of the job, and the layers of both trainings."""
    layers: list[object] = []

    def make(model: nn.Module, *arguments: Any, **options: Any) -> echelon.Engine:
        engine = echelon.parallelize(model, *arguments, **options)
        layers.append(called_layers(model))
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "parallelize", make)
        loop.train_rank(job, folder, lambda _: None)
    given = task.open_task(job)
    torch.manual_seed(job.seed)
    engine = make(
        echelon.deferred(given.build),
        job.plan,
        optimizer=partial(make_optimizer, job.optimizer),
        loss=given.loss,
        clip=job.optimizer.clip,
        schedule=job.schedule(),
        average=job.average,
        layers=job.layers,
    )
    for step in range(job.steps):
        engine.step(given.training.at(step, (engine.replica, engine.replicas)))
    return [engine.full_state_dict(averaged=averaged) for averaged in (False, True)], [
        None if each is None else each.describe() for each in layers
    ]


@pytest.mark.slow
def test_averages_and_named_layers_of_a_job_are_those_of_parallelize(
    tmp_path: Path, warm_ranks: Callable[[int], Ranks]
) -> None:
    """A job had no key for either."""
    job = Job(
        plan="data=2 zero=3",
        steps=3,
        batch=4,
        sequence=16,
        evaluate_batches=1,
        average=0.5,
        layers="blocks",
        model=ModelJob(layers=2, width=32, heads=2),
        optimizer=OptimizerJob("sgd"),
    )
    (states, layers), _ = warm_ranks(2).run(train_job_and_engine, job, tmp_path)
    assert layers == ["blocks (2 × Block)"] * 2
    for name, state in zip(("model", "model-averaged"), states, strict=True):
        torch.testing.assert_close(load_hf(tmp_path / name).state_dict(), state, rtol=0, atol=1e-6)
    assert not torch.equal(states[0]["embedding.tokens.weight"], states[1]["embedding.tokens.weight"])


def sample_place(job: Job, folder: Path) -> list[str]:
    """Where a rank says that it is while it writes the sample of a training."""
    events: list[Event] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "sample", lambda *_: pulse.read_own().instruction)
        loop.train_rank(job, folder, events.append)
    return [event.text for event in events if isinstance(event, Sampled)]


def test_a_long_sample_is_not_taken_for_a_hang(tmp_path: Path, warm_ranks: Callable[[int], Ranks]) -> None:
    """On a busy machine with a short deadline, the run was restarted for it, again and again."""
    job = Job(steps=1, batch=4, sequence=16, evaluate_batches=1, model=ModelJob(layers=1, width=32, heads=2))
    assert warm_ranks(2).run(sample_place, job, tmp_path) == [["the sample"], []]


class OnDevice:
    """An operation of 2 s on a device, which the device has not completed."""

    def __init__(self, move: Move, reads: list[str]) -> None:
        self._move, self._reads = move, reads

    def is_complete(self) -> bool:
        return False

    def read(self) -> Move:
        self._reads.append(self._move.operation)
        self._move.seconds = 2.0
        return self._move


def test_a_step_is_recorded_without_waiting_and_its_times_are_read_a_step_later() -> None:
    # Rank 0 read the ledger's times right after every step, and the GPU had nothing to do meanwhile.
    engine = echelon.parallelize(Perceptron(), "data=1", optimizer=adamw, loss=mean_loss)
    reads: list[str] = []
    reports = []
    for step, (operation, sent) in enumerate((("first", 10), ("second", 20)), start=1):
        metrics = engine.step(vectors(0))
        move = engine.ledger.begin("data", operation, Traffic(sent, sent, sent), 0.0)
        engine.ledger.defer(OnDevice(move, reads))
        reports.append((metrics, loop.report_of(engine, step, metrics)))
    assert reads == []
    metrics, report = reports[0]
    event = report()
    assert reads == ["first"], "the second step is under way"
    assert (event.moved_bytes, event.comm_seconds, event.comm_hidden_seconds) == (10, 2.0, 2.0)
    assert (event.learning_rate, event.seconds) == (engine.learning_rate, metrics.seconds)


def traced_steps(folder: Path) -> set[int]:
    events = json.loads((folder / loop.TRACE).read_text(encoding="utf-8"))["traceEvents"]
    return {event["args"]["step"] for event in events if event["ph"] == "X"}


def train_parts_of_a_traced_job(folder: Path) -> list[set[int]]:
    model, traced = ModelJob(layers=1, width=32, heads=2), []
    job = Job(
        plan="data=1", steps=5, batch=2, sequence=16, evaluate_every=0, save_every=4, model=model, trace="3:6"
    )
    for part in (job, dataclasses.replace(job, steps=6), dataclasses.replace(job, steps=8, trace="3:8")):
        loop.train_rank(part, folder, lambda _: None)
        traced.append(traced_steps(folder))
        if part.steps == 6:
            (folder / loop.TRACE).unlink()
    return traced


@pytest.mark.slow
def test_a_job_has_the_trace_of_the_steps_it_names(
    tmp_path: Path, warm_ranks: Callable[[int], Ranks]
) -> None:
    """A part that goes on after some of them leaves what the part before it has written."""
    (traced,) = warm_ranks(1).run(train_parts_of_a_traced_job, tmp_path)
    assert traced == [{3, 4, 5}, {3, 4, 5}, {7}]
