"""A loss that jumps takes training back to a checkpoint, and the batches of the spike are left out."""

import io
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.state.checkpoint.folder import CheckpointFolder
from echelon.train import loop
from echelon.train.display import Display
from echelon.train.events import Event, RolledBack, Started, Stepped
from echelon.train.jobs.job import Job, ModelJob, OptimizerJob
from echelon.train.run import Logbook
from echelon.train.runs import rollbacks
from echelon.train.runs.rollbacks import (
    SKIPPED,
    DataPosition,
    LossSpikeError,
    Rollbacks,
    SkippedBatches,
    SpikeWatch,
    Trouble,
)
from echelon.train.runs.run_folder import RunFolder
from echelon.train.task import open_task
from echelon.update.nonfinite import NonfiniteError
from tests.train.test_display import stepped


def test_a_loss_is_judged_by_the_median_of_those_before_it() -> None:
    watch = SpikeWatch(4.0, 5)
    assert [watch.judge(step, loss) for step, loss in enumerate([3.1, 3.0, 2.9, 3.0, 2.9], 1)] == [None] * 5
    assert watch.judge(6, 12.0) is None, "4 × 3.0, and not more"
    assert watch.judge(7, 12.1) == Trouble(
        7, 7, "the loss of step 7, 12.1, is more than 4 × 3, the median of the last 5"
    )
    assert watch.as_plain() == [3.0, 2.9, 3.0, 2.9, 12.0], "a spike is not among them"


def test_nothing_is_judged_before_there_are_enough() -> None:
    watch = SpikeWatch(2.0, 3)
    assert watch.judge(1, 1.0) is None
    assert watch.judge(2, 1000.0) is None
    assert watch.judge(3, 1.0) is None
    assert watch.judge(4, 2.5) is not None


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_always_one(loss: float) -> None:
    trouble = SpikeWatch(2.0, 3).judge(1, loss)
    assert trouble is not None
    assert trouble.reason == f"the loss of step 1 is {loss:g}"


def test_without_a_factor_nothing_is() -> None:
    watch = SpikeWatch(0.0, 1)
    assert [watch.judge(step, loss) for step, loss in enumerate([1.0, 1e9, math.nan])] == [None] * 3
    assert not watch.is_on


def test_a_training_that_goes_on_judges_as_before() -> None:
    watch, again = SpikeWatch(2.0, 3), SpikeWatch(2.0, 3)
    for step in range(3):
        watch.judge(step, 1.0)
    again.restore(watch.as_plain())
    assert again.judge(4, 3.0) == watch.judge(4, 3.0) is not None
    again.restore([1.0, "2", None, math.nan, True, 1, 1.0])
    assert again.as_plain() == [1.0, 1.0, 1.0]
    again.restore({"from": "a stranger"})
    assert again.as_plain() == []


SPIKE = LossSpikeError(Trouble(130, 130, "the loss jumped"))
ON = Job(spike_factor=3.0)


class StandIn:
    """Checkpoints of steps 50 and 100."""

    def __init__(self, num_rollbacks: int = 0) -> None:
        self.num_rollbacks, self.asked = num_rollbacks, list[Trouble]()

    def can_roll_back(self, step: int) -> bool:
        return step > 50

    def roll_back(self, trouble: Trouble) -> RolledBack:
        self.num_rollbacks += 1
        self.asked.append(trouble)
        step = 100 if trouble.first > 100 else 50
        return RolledBack(step, trouble.last, trouble.reason, step, trouble.last, self.num_rollbacks, 3)


def test_a_spike_goes_back_to_before_it() -> None:
    checkpoints = StandIn()
    event = Rollbacks(ON, checkpoints).after(SPIKE)
    assert event == RolledBack(100, 130, "the loss jumped", 100, 130, 1, 3)
    assert checkpoints.asked == [SPIKE.trouble]


def test_steps_that_are_not_finite_go_back_to_before_the_first_of_them() -> None:
    # A checkpoint from among them has the weights that they failed with.
    checkpoints = StandIn()
    event = Rollbacks(ON, checkpoints).after(NonfiniteError.of(10, 103))
    assert (event.step, event.from_step) == (50, 104)
    assert [(trouble.first, trouble.last) for trouble in checkpoints.asked] == [(95, 104)]


@pytest.mark.parametrize(
    ("checkpoints", "step", "reason"),
    [
        (StandIn(3), 130, "the run has gone back to a checkpoint 3 times (max_rollbacks=3)"),
        (StandIn(), 20, "there is no checkpoint from before step 20 (save_every=100)"),
    ],
)
def test_what_cannot_go_back_is_an_error(checkpoints: StandIn, step: int, reason: str) -> None:
    rollbacks = Rollbacks(ON, checkpoints)
    with pytest.raises(UserError) as caught:
        rollbacks.after(LossSpikeError(Trouble(step, step, "the loss jumped")))
    assert str(caught.value).startswith(
        f"the loss jumped; {reason}; lower optimizer.learning_rate (now 0.003)"
    )
    with pytest.raises(NonfiniteError) as also_caught:
        rollbacks.after(NonfiniteError.of(1, step - 1))
    assert str(also_caught.value).endswith(reason)
    assert checkpoints.asked == []


def test_one_rollback_and_one_batch_are_said_in_the_singular() -> None:
    with pytest.raises(UserError, match=r"gone back to a checkpoint once \(max_rollbacks=1\)"):
        Rollbacks(Job(spike_factor=3.0, max_rollbacks=1), StandIn(1)).after(SPIKE)
    console = Console(file=io.StringIO(), width=200)
    with Display(Job(steps=40), console) as display:
        display.show(RolledBack(22, 23, "the loss of step 23 jumped", 22, 23, 1, 3))
    assert isinstance(console.file, io.StringIO)
    assert "going back to step 22, without batch 22 (1 of 3 rollbacks)" in console.file.getvalue()


def test_without_a_factor_steps_that_are_not_finite_end_the_training() -> None:
    error, checkpoints = NonfiniteError.of(10, 130), StandIn()
    with pytest.raises(NonfiniteError) as caught:
        Rollbacks(Job(), checkpoints).after(error)
    assert caught.value is error
    assert checkpoints.asked == []


def test_the_file_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / SKIPPED
    assert SkippedBatches.read(path) == SkippedBatches()
    written = SkippedBatches(2, ((3, 9), (12, 14)), (RolledBack(3, 9, "the loss jumped", 3, 9, 1, 3),))
    path.write_text(written.text(), encoding="utf-8")
    assert SkippedBatches.read(path) == written


@pytest.mark.parametrize("events", [None, 7, [[]], [{}], [{"step": 3}], [{"step": "3", "reason": 5}]])
def test_rollbacks_that_cannot_be_read_cost_their_lines_alone(events: object) -> None:
    value = {"rollbacks": 1, "skipped": [[3, 9]], "events": events}
    assert SkippedBatches.parse(value) == SkippedBatches(1, ((3, 9),))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"rollbacks": -1, "skipped": []}',
        '{"rollbacks": 1}',
        '{"rollbacks": 1, "skipped": [[2, 1]]}',
        "[" * 100_000,
        '{"rollbacks": "x", "skipped": []}',
    ],
)
def test_a_file_that_no_training_has_written_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / SKIPPED
    path.write_text(text, encoding="utf-8")
    with pytest.raises(
        UserError, match=r"skipped_batches.json cannot be read .*remove it to train them again"
    ):
        SkippedBatches.read(path)


def test_checkpoints_from_a_step_on_are_removed(tmp_path: Path) -> None:
    for step in (50, 100, 150):
        (tmp_path / f"step-{step:08d}").mkdir()
    (tmp_path / "latest").write_text("step-00000150", encoding="utf-8")
    folder = CheckpointFolder(tmp_path)
    folder.discard_from(100)
    assert folder.steps() == [50]
    assert (tmp_path / "latest").read_text(encoding="utf-8") == "step-00000050"


def test_a_rollback_is_shown_and_kept(tmp_path: Path) -> None:
    run, console = RunFolder.create(tmp_path, "a", {}), Console(file=io.StringIO(), width=200)
    event = RolledBack(2, 4, "the loss of step 4 jumped", 2, 4, 1, 3)
    logbook = Logbook(run)
    with Display(Job(steps=4), console) as display:
        for each in (Started(42, 9000, "stdlib", "cpu"), *map(stepped, range(1, 5)), event, stepped(3)):
            logbook.take(each)
            display.show(each)
    logbook.close()
    assert isinstance(console.file, io.StringIO)
    text = " ".join(console.file.getvalue().split())
    assert (
        "the loss of step 4 jumped; going back to step 2, without batches 2 to 3 (1 of 3 rollbacks)" in text
    )
    lines = (run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    kept = [(entry["kind"], entry["step"]) for entry in map(json.loads, lines)]
    assert kept == [("step", 1), ("step", 2), ("rollback", 2), ("step", 3)]
    assert json.loads(lines[2])["from_step"] == 4
    assert (logbook.summary()["steps"], logbook.summary()["rollbacks"]) == (3, 1)
    again = Logbook(run)
    again.take(Started(42, 9000, "stdlib", "cpu", after_step=1))
    assert again.summary()["rollbacks"] == 1, "it has happened, though training goes on from before it"


# With ranks.


class Detour:
    """The training batches of a task are one letter; those of `strange` are noise, those of `poison` have a
    loss that is not a number; those of `left_out` do not exist."""

    def __init__(self, task: Any, strange: range, poison: range, left_out: range) -> None:
        self._task, self._strange, self._poison, self._left_out = task, strange, poison, left_out
        self.training = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def at(self, number: int, part: tuple[int, int] = (0, 1)) -> tuple[Tensor, Tensor]:
        number += len(self._left_out) if number >= self._left_out.start else 0
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randint(97, 99, (4, 16), generator=generator)
        if number in self._strange:
            inputs = torch.randint(200, 255, (4, 16), generator=generator)
        targets = inputs.clone()
        if number in self._poison:
            targets[3, 3] = 255
        index, parts = part
        rows = slice(index * 4 // parts, (index + 1) * 4 // parts)
        return inputs[rows], targets[rows]

    def loss(self, output: Any, targets: Tensor) -> Any:
        total, count = self._task.loss(output, targets)
        return total * torch.where((targets == 255).any(), math.nan, 1.0), count


def train_on_rank(job: Job, folder: Path, **batches: range) -> tuple[list[Event], str | None]:
    """What a rank reports, and the error that ends it."""
    events: list[Event] = []
    given = {"strange": range(0), "poison": range(0), "left_out": range(0)} | batches
    with mock.patch.object(loop, "open_task", lambda job: Detour(open_task(job), **given)):
        try:
            loop.train_rank(job, folder, events.append)
        except UserError as error:
            return events, str(error)
    return events, None


def job_of(**changes: Any) -> Job:
    return Job(
        **{
            "plan": "data=2 precision=fp64 zero=1",
            "steps": 12,
            "batch": 4,
            "sequence": 16,
            "save_every": 3,
            "spike_factor": 1.5,
            "spike_window": 3,
            "most_skipped": 2,
            "evaluate_every": 0,
            "audit": "off",
            "model": ModelJob(layers=1, width=16, heads=2),
            "optimizer": OptimizerJob(learning_rate=0.03, schedule="constant", warmup=0),
        }
        | changes
    )


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def check_rollback(
    ranks: Ranks, folder: Path, wrong: dict[str, range], from_step: int, left_out: range
) -> list[Event]:
    """A run that goes wrong ends with the weights, bit by bit, of one that never had the batches."""
    results = ranks.run(partial(train_on_rank, **wrong), job_of(), folder / "wrong")
    assert [error for _, error in results] == [None, None]
    events = results[0][0]
    (event,) = (event for event in events if isinstance(event, RolledBack))
    assert (event.step, event.from_step) == (6, from_step)
    assert range(event.first_batch, event.end_batch) == left_out
    steps = [event.step for event in events if isinstance(event, Stepped)]
    assert steps[-6:] == [7, 8, 9, 10, 11, 12]
    plain = ranks.run(partial(train_on_rank, left_out=left_out), job_of(spike_factor=0.0), folder / "plain")
    assert plain[0][1] is None
    expected, found = weights(folder / "plain"), weights(folder / "wrong")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    return events


@pytest.mark.slow
def test_a_run_with_a_spike_is_one_without_its_batches(
    tmp_path: Path, warm_ranks: Callable[[int], Ranks]
) -> None:
    check_rollback(warm_ranks(2), tmp_path, {"strange": range(7, 8)}, 8, range(6, 8))
    kept = json.loads((tmp_path / "wrong" / SKIPPED).read_text(encoding="utf-8"))
    assert (kept["rollbacks"], kept["skipped"]) == (1, [[6, 8]])
    (event,) = kept["events"]
    assert (event["step"], event["from_step"], event["first_batch"], event["end_batch"]) == (6, 8, 6, 8)


@pytest.mark.slow
def test_so_is_one_with_steps_that_are_not_finite(tmp_path: Path, warm_ranks: Callable[[int], Ranks]) -> None:
    check_rollback(warm_ranks(2), tmp_path, {"poison": range(7, 9)}, 9, range(6, 9))


@pytest.mark.slow
def test_a_run_goes_back_so_often_at_most_and_a_resumed_one_remembers(
    tmp_path: Path, warm_ranks: Callable[[int], Ranks]
) -> None:
    job = job_of(max_rollbacks=2)
    every = partial(train_on_rank, strange=range(7, 100))
    (events, error), *_ = warm_ranks(2).run(every, job, tmp_path)
    assert [event.number for event in events if isinstance(event, RolledBack)] == [1, 2]
    assert error is not None
    assert "the run has gone back to a checkpoint 2 times (max_rollbacks=2)" in error
    (events, error), *_ = warm_ranks(2).run(train_on_rank, job_of(max_rollbacks=2), tmp_path)
    assert error is None
    assert not any(isinstance(event, RolledBack) for event in events)
    (started,) = (event for event in events if isinstance(event, Started))
    assert [event.number for event in started.rollbacks] == [1, 2], "metrics.jsonl may lack them"
    assert json.loads((tmp_path / SKIPPED).read_text(encoding="utf-8"))["rollbacks"] == 2


RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)).map(lambda r: (r[0], r[0] + r[1])))


def test_without_a_rollback_step_and_batch_are_the_same() -> None:
    assert [DataPosition.after_steps(steps).next_batch for steps in range(4)] == [0, 1, 2, 3]


def test_the_picture_of_the_module() -> None:
    position = DataPosition.after_steps(2).skip(2, 5)
    assert position == DataPosition(5, ((2, 5),))
    trained = [DataPosition.after_steps(steps, position.skipped).next_batch for steps in range(5)]
    assert trained == [0, 1, 5, 6, 7]


@given(RANGES)
def test_every_batch_is_trained_once_or_left_out(ranges: list[tuple[int, int]]) -> None:
    left_out = {batch for begin, end in ranges for batch in range(begin, end)}
    trained = [DataPosition.after_steps(steps, ranges).next_batch for steps in range(20)]
    assert trained == [batch for batch in range(200) if batch not in left_out][:20]


def test_ranges_of_a_stranger_are_united_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each of them would take hours for those that fit into a manifest."""
    united, calls = rollbacks._united, list[int]()
    monkeypatch.setattr(rollbacks, "_united", lambda ranges: calls.append(1) or united(ranges))
    skipped = tuple((2 * number, 2 * number + 1) for number in range(1000))
    position = DataPosition.after_steps(1000, skipped[:500])
    assert position.with_others(1000, skipped[400:500]) == position
    assert DataPosition(0, ()).with_others(0, skipped) == DataPosition(1, skipped)
    assert len(calls) == 3


@given(RANGES, st.integers(0, 30), st.integers(1, 5))
def test_what_is_left_out_adds_up(ranges: list[tuple[int, int]], begin: int, size: int) -> None:
    position = DataPosition.after_steps(7, ranges).skip(begin, begin + size)
    assert position.skipped == DataPosition.after_steps(0, [*ranges, (begin, begin + size)]).skipped
    assert not any(start <= position.next_batch < end for start, end in position.skipped)
    assert DataPosition.parse(position.as_plain()) == position


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"next_batch": 3},
        {"next_batch": -1, "skipped": []},
        {"next_batch": True, "skipped": []},
        {"next_batch": 2**63, "skipped": []},
        {"next_batch": 1.5, "skipped": []},
        {"next_batch": 3, "skipped": None},
        {"next_batch": 3, "skipped": [[1]]},
        {"next_batch": 3, "skipped": [[2, 1]]},
        {"next_batch": 3, "skipped": [[1, "2"]]},
        {"next_batch": 3, "skipped": [[5, 6], [1, 2]]},
        {"next_batch": 3, "skipped": [[1, 3], [2, 4]]},
    ],
)
def test_what_no_training_has_saved_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match="the position in the data must have next_batch"):
        DataPosition.parse(value)
