"""What every rank prints before its watchdog ends it: which rank blocks the others, and where each one is.

Pure functions of what the ranks have said; `watchdog.py` asks them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echelon.launching.watch.deadline import VARIABLE
from echelon.launching.watch.hang import describe, rank_to_blame
from echelon.launching.watch.pulse import Pulse

_SILENT = "gives no answer: its process or its host is gone, or its interpreter is blocked"


@dataclass(frozen=True)
class Ending:
    """How a rank left the job before the others were told to end; `reason` follows 'rank 3 …'."""

    reason: str
    has_failed: bool = False
    lost_peer: bool = False  # it failed because another rank was gone


@dataclass(frozen=True)
class Findings:
    """What is known of the ranks of a job that ends: each has answered, has ended before, or neither."""

    reason: str  # 'no rank gave a sign of life for 2 s'
    ranks: int
    pulses: Mapping[int, Pulse]
    frames: Mapping[int, str]  # where the hosts are ('in load (data.py:31)')
    endings: Mapping[int, Ending]

    def states(self) -> list[str]:
        """What each rank does, in words."""
        return [self._state(rank) for rank in range(self.ranks)]

    def to_blame(self) -> tuple[int, str]:
        """The rank that the others seem to wait for, and why ('rank 1 …').

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

    def _state(self, rank: int) -> str:
        if rank in self.endings:
            return self.endings[rank].reason
        if rank in self.pulses:
            return describe(self.pulses[rank], returned=False, frame=self.frames.get(rank, ""))
        return _SILENT


def report_text(findings: Findings, reporter: int, stacks: Mapping[int, str], exit_code: int) -> str:
    """What rank `reporter` prints; `stacks` has its own and that of the rank to blame."""
    rank, why = findings.to_blame()
    # A failure is the reason itself.
    reason = "" if findings.reason.startswith(f"rank {rank} {why}") else f"; {findings.reason}"
    lines = [f"echelon, rank {reporter}: rank {rank} {why}{reason}", *_by_state(findings.states())]
    for each, stack in stacks.items():
        lines += ["", f"stack of rank {each}:", stack.rstrip()]
    lines += ["", f"echelon, rank {reporter}: ends with exit code {exit_code}. {_advice(findings)}"]
    return "\n".join(lines) + "\n"


def _advice(findings: Findings) -> str:
    if any(ending.has_failed for ending in findings.endings.values()):
        return "The cause is the error of the rank that failed."
    return (
        f"If the ranks do not hang but work longer than that, set {VARIABLE}=SECONDS (or none), or call "
        "echelon.launching.beat() in long work. debug=true in the plan finds ranks that call different "
        "operations."
    )


def _by_state(states: Sequence[str]) -> list[str]:
    """'  ranks 0, 2-5 wait in …': one line for all ranks that do the same."""
    ranks: dict[str, list[int]] = {}
    for rank, state in enumerate(states):
        ranks.setdefault(state, []).append(rank)
    return [
        f"  rank {same[0]} {state}" if len(same) == 1 else f"  ranks {_runs(same)}, each: {state}"
        for state, same in ranks.items()
    ]


def _runs(numbers: Sequence[int]) -> str:
    """'0, 2-5'"""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
