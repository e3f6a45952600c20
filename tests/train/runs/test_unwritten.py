"""A checkpoint has the lines of metrics.jsonl that are on their way, and a run that goes on writes them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.launching import Ranks
from echelon.train.checkpoints import CHECKPOINTS, UnwrittenLines
from echelon.train.events import METRICS, Evaluated, Event, Sampled, Started, Stepped, line_of, read_metrics
from echelon.train.jobs.job import Job, ModelJob
from echelon.train.loop import train_rank
from echelon.train.run import Logbook
from echelon.train.runs.run_folder import RunFolder
from tests.train.test_events import stepped


def write(path: Path, *events: Stepped | Evaluated) -> None:
    path.write_text("".join(f"{line_of(event)}\n" for event in events), encoding="utf-8")


def steps_in(folder: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (folder / METRICS).read_text(encoding="utf-8").splitlines())
    return [(line["step"], line["loss"]) for line in lines]


def test_what_the_file_has_is_forgotten(tmp_path: Path) -> None:
    unwritten = UnwrittenLines(tmp_path / METRICS)
    events: list[Stepped | Evaluated] = [stepped(1), stepped(2), Evaluated(2, 0.5), stepped(3)]
    for event in (*events, Sampled("other")):
        unwritten.add(event)
    assert unwritten.as_plain() == [line_of(event) for event in events]
    write(tmp_path / METRICS, *events[:2])
    assert unwritten.as_plain() == [line_of(event) for event in events[1:]]  # whole steps
    write(tmp_path / METRICS, *events)
    assert unwritten.as_plain() == []


def test_a_line_of_an_attempt_before_is_another(tmp_path: Path) -> None:
    unwritten = UnwrittenLines(tmp_path / METRICS)
    write(tmp_path / METRICS, stepped(1, 0.5))
    unwritten.add(stepped(1, 0.75))
    assert unwritten.as_plain() == [line_of(stepped(1, 0.75))]


def test_lines_that_nobody_saves_do_not_pile_up(tmp_path: Path) -> None:
    unwritten, events = UnwrittenLines(tmp_path / METRICS), [stepped(step) for step in range(1, 1001)]
    write(tmp_path / METRICS, *events[:999])
    for event in events:
        unwritten.add(event)
    assert unwritten.lines == (line_of(events[-1]),)


def test_what_cannot_be_read_is_not_restored(tmp_path: Path) -> None:
    unwritten = UnwrittenLines(tmp_path / METRICS)
    values: list[object] = [
        None,
        3,
        {},
        [1, "{", "[]", '{"kind": "step"}', '{"kind": "rollback", "step": 1}'],
    ]
    for value in values:
        unwritten.restore(value)
        assert unwritten.lines == ()
    unwritten.restore([line_of(stepped(1))])
    assert unwritten.lines == (line_of(stepped(1)),)


def test_the_logbook_writes_what_is_missing(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "a", {})
    write(folder.path / METRICS, stepped(1), stepped(2), stepped(3, 0.25))  # 3 is of an attempt before
    logbook = Logbook(folder)
    lines = (line_of(stepped(3)), line_of(stepped(4)))
    for _ in range(2):  # the second time they are there
        logbook.take(Started(42, 9000, "stdlib", "cpu", after_step=4, lines=lines))
        assert steps_in(folder.path) == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0)]
        assert logbook.last_step == 4


def train_twice(job: Job, folder: Path) -> list[Event]:
    """Tell a parent that writes nothing, lose the last checkpoint, and go on; returns what was told first."""
    told: list[Event] = []
    train_rank(job, folder, told.append)
    (folder / CHECKPOINTS / "step-00000003").rename(folder / "later")
    train_rank(job, folder, Logbook(RunFolder(folder)).take)
    return told


@pytest.mark.slow
def test_a_parent_that_was_killed_before_it_wrote_loses_no_step(
    tmp_path: Path, warm_ranks: Callable[[int], Ranks]
) -> None:
    model = ModelJob(layers=1, width=16, heads=2)
    job = Job(steps=3, batch=2, sequence=16, save_every=2, evaluate_batches=1, plan="data=1", model=model)
    folder = RunFolder.create(tmp_path, "a", {}).path
    (told,) = warm_ranks(1).run(train_twice, job, folder)
    expected = [event for event in told if isinstance(event, Stepped | Evaluated)]
    found = read_metrics(folder / METRICS)
    assert found[:2] == expected[:2]
    assert [(event.step, event.loss) for event in found] == [(event.step, event.loss) for event in expected]
