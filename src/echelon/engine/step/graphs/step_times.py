"""Whether the host is the slower one in a step, and whether a replay of its passes makes the step shorter.

host      passes ──────── update ──── …      a device that waits for updates waits for passes too
device      passes ─────────── update        where the host asks for them by a replay, it need not
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

from echelon.engine.step.graphs.cuda_recorder import Timing

_COUNTED = 2  # the last steps of those that were measured: the first of all measure memory, which takes time
_MOST_SECONDS = 0.25  # of passes that may be bound by the host
_HOST_BOUND = 0.8  # of the device's time for passes, which the host needs for a step
_GAIN = 0.9  # of the time of a step as it is, which one with a replay may take


class _Seconds(NamedTuple):
    """What passes take the device, and what they and whole steps take the host."""

    device: float
    passes: float
    step: float


@final
@dataclass
class StepTimes:
    """Passes as they are, the host's seconds for the steps around them, and replays."""

    as_is: list[Timing] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)  # none of a loop that calls passes by itself
    replays: list[Timing] = field(default_factory=list)

    def is_host_bound(self) -> bool | None:
        """Return whether the host takes about as long for a step as the device for its passes; None while the
        device is at it."""
        seconds = self._seconds()
        if seconds is None:
            return None
        return seconds.device < _MOST_SECONDS and seconds.step > _HOST_BOUND * seconds.device

    def is_faster(self) -> bool:
        """Return whether a step with a replay takes clearly less time: the device for its passes, or the host
        for what is left of the step, whichever is longer."""
        seconds, on_device = self._seconds(), _on_device(self.replays)
        if seconds is None or not on_device:
            return False
        left = seconds.step - seconds.passes + min(each.host_seconds for each in self.replays)
        return max(min(on_device), left) <= _GAIN * max(seconds.device, seconds.step)

    def _seconds(self) -> _Seconds | None:
        """Return the times of steps as they are; None while the device is at it."""
        counted = self.as_is[-_COUNTED:]
        on_device = _on_device(counted)
        if len(on_device) < len(counted):
            return None
        # The least of each: a pause of the host (garbage, a slow observer) is no property of the step.
        passes = min(each.host_seconds for each in counted)
        return _Seconds(min(on_device), passes, min(self.steps[-_COUNTED:] or [passes]))


def _on_device(timings: Sequence[Timing]) -> list[float]:
    return [seconds for each in timings if (seconds := each.device_seconds()) is not None]
