"""Hangs: when silence is too long, which rank blocks the others, and what every rank was doing.

`Watch` has the clock; the rest are pure functions of the pulses.
"""

import re
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from echelon.launching.settings import VARIABLE
from echelon.launching.watch.pulse import Board, Pulse
from echelon.quantities import counted, show_runs


class Watch:
    """Detects that no rank has given a sign of life for `deadline` seconds (None: never)."""

    def __init__(self, board: Board, deadline: float | None) -> None:
        self._board = board
        self._deadline = deadline
        self._last_pulses = board.read()
        self._last_sign = time.monotonic()

    @property
    def period(self) -> float | None:
        return None if self._deadline is None else min(self._deadline / 10, 1.0)

    @property
    def reason(self) -> str:
        return f"no rank gave a sign of life for {self._deadline:g} s"

    def sign_of_life(self) -> None:
        self._last_sign = time.monotonic()

    def deadline_passed(self) -> bool:
        """Read the pulses, and say whether they have not changed for too long."""
        if self._deadline is None:
            return False
        pulses = self._board.read()
        if pulses != self._last_pulses:
            self._last_pulses = pulses
            self.sign_of_life()
        return time.monotonic() - self._last_sign > self._deadline


def rank_to_blame(
    pulses: Sequence[Pulse], returned: Collection[int], states: Sequence[str]
) -> tuple[int, str]:
    """Return the rank that the others seem to wait for, and why ('rank 1 …'); `states` are by `describe`.

    First comes a rank that works while others wait, then one that has returned while others wait, then the
    one that is furthest behind, then one in an operation that the fewest are in. If all are equal, it is the
    lowest rank.
    """

    def priority(rank: int) -> tuple[int, int]:
        pulse = pulses[rank]
        return 1 if rank in returned else 2 if pulse.waits else 0, pulse.entered

    rank = min(range(len(pulses)), key=priority)
    if len(pulses) > 1 and len({priority(each) for each in range(len(pulses))}) == 1:
        names = Counter(pulse.name for pulse in pulses)
        if len(names) == 1 or not pulses[rank].waits:
            return rank, "is only the first: all ranks are at the same point"
        rank = min(range(len(pulses)), key=lambda each: names[pulses[each].name])
        return rank, f"is in another operation than others: it {states[rank]}"
    return rank, f"seems to block the others: it {states[rank]}"


def describe(pulse: Pulse, returned: bool, frame: str = "") -> str:
    """'is in step 7, at RG5 of stage 1, microbatch 5, waits in recv pipeline (operation 12)': follows
    'rank 0 …' or 'it …'.

    `frame` says where the rank's host is; a host that waits for its GPU is inside no operation.
    """
    if returned:
        return f"has returned, after {counted(pulse.left, 'operation')}"
    if pulse.waits:
        return f"{place_of(pulse)}waits in {pulse.name} (operation {pulse.entered})"
    where = f", {frame}" if frame else ""
    return f"{place_of(pulse)}works outside any operation, after {counted(pulse.left, 'operation')}{where}"


def place_of(pulse: Pulse) -> str:
    """Return 'is in step 7, at F0 of stage 1, microbatch 0, ', where a rank is; '' if unknown."""
    at = f"at {pulse.instruction}, " if pulse.instruction else ""
    if pulse.is_stepping:
        return f"is in step {pulse.step}, {at}"
    done = f"has done step {pulse.step}, " if pulse.step else ""
    return f"{done}is {at}" if at else done


def main_frame(stacks: str) -> str:
    """Return where the main thread is ('in item (loop.py:88)'), by faulthandler's text; '' if unclear."""
    threads = re.split(r"^(?:Current thread|Thread) ", stacks, flags=re.MULTILINE)
    if stacks.rstrip().endswith("..."):  # too many threads: the main thread, which comes last, is missing
        return ""
    frame = re.search(r'File "([^"]*)", line (\d+) in (\S+)', threads[-1])
    return f"in {frame[3]} ({PurePath(frame[1]).name}:{frame[2]})" if frame else ""


# What every rank of torchrun prints before its watchdog ends it.

_SILENT = "gives no answer: its process or its host is gone, or its interpreter is blocked"


@dataclass(frozen=True)
class Ending:
    """The end of a rank that left the job before the others; `reason` follows 'rank 3 …'."""

    reason: str
    has_failed: bool = False
    lost_peer: bool = False  # it failed because another rank was gone


@dataclass(frozen=True)
class Findings:
    """The facts of the ranks of a job that ends: each has answered, has ended before, or neither."""

    reason: str  # 'no rank gave a sign of life for 2 s'
    ranks: int
    pulses: Mapping[int, Pulse]
    frames: Mapping[int, str]  # where the hosts are ('in load (data.py:31)')
    endings: Mapping[int, Ending]

    def states(self) -> list[str]:
        states = {rank: ending.reason for rank, ending in self.endings.items()}
        for rank, pulse in self.pulses.items():
            state = describe(pulse, returned=False, frame=self.frames.get(rank, ""))
            states.setdefault(rank, state)
        return [states.get(rank, _SILENT) for rank in range(self.ranks)]

    def to_blame(self) -> tuple[int, str]:
        """Return the rank that the others seem to wait for, and why ('rank 1 …').

        First comes a rank that failed, then one that is silent, then one that failed because it lost a peer,
        then whom `rank_to_blame` finds by the pulses.
        """
        failed = [rank for rank, ending in sorted(self.endings.items()) if ending.has_failed]
        causes = [rank for rank in failed if not self.endings[rank].lost_peer]
        known = {*self.pulses, *self.endings}
        silent = [rank for rank in range(self.ranks) if rank not in known]
        states = self.states()
        for rank in (*causes, *silent, *failed):
            return rank, states[rank]
        pulses = [self.pulses.get(rank, Pulse(0, 0, 0, "")) for rank in range(self.ranks)]
        return rank_to_blame(pulses, self.endings, states)


def report_text(findings: Findings, reporter: int, stacks: Mapping[int, str], exit_code: int) -> str:
    """Return what rank `reporter` prints; `stacks` has its own and that of the rank to blame."""
    rank, why = findings.to_blame()
    # A failure is the reason itself.
    reason = "" if findings.reason.startswith(f"rank {rank} {why}") else f"; {findings.reason}"
    lines = [f"echelon, rank {reporter}: rank {rank} {why}{reason}"]
    ranks: dict[str, list[int]] = {}
    for each, state in enumerate(findings.states()):
        ranks.setdefault(state, []).append(each)
    for state, same in ranks.items():  # '  ranks 0, 2-5, each: waits in …'
        lines.append(
            f"  rank {same[0]} {state}"
            if len(same) == 1
            else f"  ranks {', '.join(show_runs(same))}, each: {state}"
        )
    for each, stack in stacks.items():
        lines += ["", f"stack of rank {each}:", stack.rstrip()]
    advice = (
        f"If the ranks do not hang but work longer than that, set {VARIABLE}=SECONDS (or none), or call "
        "echelon.launching.beat() in long work. debug=true in the plan finds ranks that call different "
        "operations."
    )
    if any(ending.has_failed for ending in findings.endings.values()):
        advice = "The cause is the error of the rank that failed."
    lines += ["", f"echelon, rank {reporter}: ends with exit code {exit_code}. {advice}"]
    return "\n".join(lines) + "\n"
