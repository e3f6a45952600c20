"""Loss spikes: training goes back to a checkpoint, without the batches that led to one, a few times at most.

    losses    3.1  3.0  2.9  3.0  2.9    41.0
    factor=4       median 3.0            a spike: more than 4 × 3.0

A loss is judged when `window` finite ones came before it. Spikes, and losses of skipped steps, are not among
them.

What was left out is kept beside the checkpoints, so that a run that is resumed leaves it out too:

    runs/train-20261115-020304/skipped_batches.json
        {"rollbacks": 1, "skipped": [[100, 131]], "events": [{"step": 100, "from_step": 131, "reason": …}]}

Batches are functions of their number (data/sampler.py). Without a rollback, step s trains batch s − 1. After
one, numbers of steps and of batches are no longer the same:

    step      1  2  3  4  ×     back to 2, without batches 2 to 4     3  4  5
    batch     0  1  2  3  4                                           5  6  7
"""

import dataclasses
import json
import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

from echelon.errors import UserError
from echelon.state.bounded_json import MOST_BYTES, parse_json
from echelon.state.checkpoint.file_checks import read_regular
from echelon.train.events import RolledBack
from echelon.train.jobs.job import Job
from echelon.update.nonfinite import NonfiniteError

if TYPE_CHECKING:
    from echelon.train.checkpoints import Checkpoints

Range = tuple[int, int]  # the first batch, and the one after the last


@final
@dataclass(frozen=True)
class DataPosition:
    """The number of the next batch, and those that are never trained (again), in rising order."""

    next_batch: int = 0
    skipped: tuple[Range, ...] = ()

    @classmethod
    def after_steps(cls, steps: int, skipped: Iterable[Range] = ()) -> "DataPosition":
        ranges = _united(skipped)
        batch = steps
        for begin, end in ranges:
            if batch < begin:
                break
            batch += end - begin
        return cls(batch, ranges)

    def skip(self, begin: int, end: int) -> "DataPosition":
        """Leave out the batches from `begin` to before `end`; the next one is not before them."""
        ranges = _united([*self.skipped, (begin, end)])
        inside = [stop for start, stop in ranges if start <= self.next_batch < stop]
        return DataPosition(inside[0] if inside else self.next_batch, ranges)

    def with_others(self, steps: int, skipped: Iterable[Range]) -> "DataPosition":
        """The place after `steps`, without these batches too; a UserError if some of them were trained."""
        together = DataPosition.after_steps(steps, [*self.skipped, *skipped])
        expected = self.next_batch
        for begin, end in together.skipped:
            expected = end if begin <= expected < end else expected
        if expected != together.next_batch:
            raise UserError(
                f"the checkpoint of step {steps} goes on with batch {self.next_batch} and leaves out "
                f"{list(self.skipped)}; with all that the run leaves out, {list(together.skipped)}, it would "
                f"be batch {together.next_batch}"
            )
        return together

    def as_plain(self) -> dict[str, Any]:
        return {"next_batch": self.next_batch, "skipped": [list(each) for each in self.skipped]}

    @classmethod
    def parse(cls, value: Any) -> "DataPosition":
        """Read what `as_plain` has made; anything else is a UserError."""
        given: dict[str, Any] = value if isinstance(value, dict) else {}
        listed = given.get("skipped")
        is_listed = isinstance(listed, list) and all(
            isinstance(each, list | tuple) and len(each) == 2 and all(map(_is_number, each))
            for each in listed
        )
        ranges = tuple((begin, end) for begin, end in listed or ()) if is_listed else ((0, 0),)
        position = cls(given.get("next_batch", -1), ranges)
        if not _is_number(position.next_batch) or position.skipped != _united(position.skipped):
            raise UserError(
                "the position in the data must have next_batch, a number from 0, and skipped, pairs of such "
                "numbers in rising order; this is not what a training has saved"
            )
        return position


def _united(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sorted, with those that touch or overlap made one."""
    result: list[Range] = []
    for begin, end in sorted(each for each in ranges if each[0] < each[1]):
        if result and begin <= result[-1][1]:
            begin, end = result[-1][0], max(end, result.pop()[1])
        result.append((begin, end))
    return tuple(result)


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


class Trouble(NamedTuple):
    """Steps `first` to `last` went wrong: one by a spike, or several by numbers that are not finite."""

    first: int
    last: int
    reason: str


@final
class SpikeWatch:
    def __init__(self, factor: float, window: int) -> None:
        """`factor` 0: nothing is a spike."""
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=window)

    @property
    def is_on(self) -> bool:
        return self._factor > 0

    def judge(self, step: int, loss: float) -> Trouble | None:
        """Return what is wrong with the loss of a step that was not skipped."""
        if not self.is_on:
            return None
        if not math.isfinite(loss):
            return Trouble(step, step, f"the loss of step {step} is {loss:g}")
        median = statistics.median(self._losses) if len(self._losses) == self._losses.maxlen else math.inf
        if loss > self._factor * median:
            times = f"{self._factor:g} × {median:.4g}, the median of the last {len(self._losses)}"
            return Trouble(step, step, f"the loss of step {step}, {loss:.4g}, is more than {times}")
        self._losses.append(loss)
        return None

    def as_plain(self) -> list[float]:
        return list(self._losses)

    def restore(self, value: Any) -> None:
        """Read what `as_plain` has made; without anything that can be read, losses are gathered again."""
        losses = value if isinstance(value, list) else []
        self._losses.clear()
        self._losses.extend(
            float(each) for each in losses if type(each) in (int, float) and math.isfinite(each)
        )


SKIPPED = "skipped_batches.json"


class LossSpikeError(Exception):
    """The loss of a step has jumped; only the loop sees this."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble.reason)
        self.trouble = trouble


@final
class Rollbacks:
    """Decides whether a training that went wrong goes back, and does it; the same on every rank."""

    def __init__(self, job: Job, checkpoints: "Checkpoints") -> None:
        self._job, self._checkpoints = job, checkpoints

    def after(self, error: LossSpikeError | NonfiniteError) -> RolledBack:
        """Go back, or raise a UserError: `error`, if it is one."""
        if isinstance(error, LossSpikeError):
            trouble = error.trouble
        else:
            last = error.step + 1
            trouble = Trouble(max(1, last - error.count + 1), last, error.reason)
        reason = self._why_not(trouble) if self._job.spike_factor else ""
        if reason is None:
            return self._checkpoints.roll_back(trouble)
        if isinstance(error, NonfiniteError):
            raise NonfiniteError(f"{error}; {reason}") if reason else error
        raise UserError(
            f"{trouble.reason}; {reason}; lower optimizer.learning_rate (now "
            f"{self._job.optimizer.learning_rate}), raise optimizer.warmup, or raise spike_factor (now "
            f"{self._job.spike_factor:g})"
        )

    def _why_not(self, trouble: Trouble) -> str | None:
        limit = self._job.max_rollbacks
        if self._checkpoints.num_rollbacks >= limit:
            times = "once" if limit == 1 else f"{limit} times"
            return f"the run has gone back to a checkpoint {times} (max_rollbacks={limit})"
        saved = f"there is no checkpoint from before step {trouble.first} (save_every={self._job.save_every})"
        return None if self._checkpoints.can_roll_back(trouble.first) else saved


class SkippedBatches(NamedTuple):
    """The rollbacks in the file of a run; `events` are for metrics.jsonl, which may lack them."""

    rollbacks: int = 0
    skipped: tuple[Range, ...] = ()
    events: tuple[RolledBack, ...] = ()

    def plain(self) -> dict[str, Any]:
        return {
            "rollbacks": self.rollbacks,
            "skipped": [list(each) for each in self.skipped],
            "events": [dataclasses.asdict(each) for each in self.events],
        }

    def text(self) -> str:
        return json.dumps(self.plain()) + "\n"

    @classmethod
    def read(cls, path: Path) -> "SkippedBatches":
        """Read the file of a run; without one, nothing was skipped. Anything else in it is a UserError."""
        try:
            return cls.parse(parse_json(read_regular(path, MOST_BYTES))) if path.exists() else cls()
        except ValueError as error:  # also a UserError, of a file that cannot be read
            raise UserError(
                f"{path} cannot be read ({str(error).splitlines()[0]}); it lists the batches that a rollback "
                "has left out: remove it to train them again"
            ) from None

    @classmethod
    def parse(cls, value: Any) -> "SkippedBatches":
        number = value.get("rollbacks") if isinstance(value, dict) else None
        if type(number) is not int or number < 0:
            raise ValueError("rollbacks must be a number from 0")
        position = DataPosition.parse({"next_batch": 0, "skipped": value.get("skipped")})
        listed = value.get("events")
        kinds = {field.name: field.type for field in dataclasses.fields(RolledBack)}
        events = [  # what no training has written costs a line of metrics.jsonl
            RolledBack(**each)
            for each in (listed if isinstance(listed, list) else ())
            if isinstance(each, dict) and {name: type(content) for name, content in each.items()} == kinds
        ]
        return cls(number, position.skipped, tuple(events))
