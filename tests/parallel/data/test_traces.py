"""Each strategy does what its golden file says: which messages, when, how much memory, what results.

`python -m tests.parallel.data.test_traces` writes the files again; read what has changed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from echelon.collectives.boundary import PretendedBoundary
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.all_reduce import AllReduce, UnitAllReduce
from echelon.parallel.data.parameter_server import ParameterServer
from echelon.parallel.data.parameter_set import ShardGroups
from echelon.parallel.data.sharing import Sharing
from echelon.parallel.data.zero.host_weights import HostPlace
from echelon.parallel.data.zero.zero import Zero
from tests.parallel.data.traces import Trace, TracedGroup, TracedLedger, make_model, trace_steps
from tests.sets import set_of

pytestmark = pytest.mark.usefixtures("packed")
GOLDEN = Path(__file__).parent / "golden"


class Case(NamedTuple):
    """Rank `rank` of `size`, in `copies` of groups that shard."""

    make: Callable[..., Sharing]
    rank: int = 1
    size: int = 2
    microbatches: int = 1
    copies: int = 1
    in_backward: bool = False
    host: dict[str, Any] | None = None


def zero(level: int, **options: Any) -> Callable[..., Sharing]:
    return lambda parameters, **more: Zero(parameters, level, Wrapping(), **options, **more)


CASES = {
    "zero-1": Case(zero(1), microbatches=2),
    "zero-2": Case(zero(2), microbatches=2),
    "zero-2-contiguous": Case(zero(2, contiguous=True), microbatches=2),
    "zero-3": Case(zero(3), microbatches=2),
    "zero-3-without-prefetch": Case(zero(3, prefetch=0)),
    "zero-3-prefetch-2": Case(zero(3, prefetch=2), rank=0),
    "zero-3-hybrid": Case(zero(3), rank=2, size=4, copies=2),
    "zero-1-hybrid": Case(zero(1), rank=2, size=4, copies=2),
    "zero-1-in-backward": Case(zero(1, in_backward=True), in_backward=True, microbatches=2),
    "zero-2-in-backward": Case(zero(2, in_backward=True), in_backward=True, microbatches=2),
    "zero-3-in-backward": Case(zero(3, in_backward=True, waits=False), in_backward=True),
    "zero-3-on-host": Case(zero(3), host={}),
    "zero-2-on-host": Case(zero(2), host={"updates": True}),
    "zero-1-on-host-of-one-rank": Case(zero(1), rank=0, size=1, host={"resident_bytes": 40}),
    "zero-3-on-host-in-backward": Case(zero(3, in_backward=True), host={}, in_backward=True),
    "zero-3-on-host-in-backward-prefetch-2": Case(
        zero(3, in_backward=True, prefetch=2), host={}, in_backward=True
    ),
    "all-reduce": Case(lambda parameters: AllReduce(parameters, 16), microbatches=2),
    "unit-all-reduce": Case(UnitAllReduce, in_backward=True, microbatches=2),
    "unit-all-reduce-without-waits": Case(lambda p: UnitAllReduce(p, waits=False), in_backward=True),
    "unit-all-reduce-of-one-rank": Case(UnitAllReduce, rank=0, size=1, in_backward=True),
    "server": Case(lambda parameters: ParameterServer(parameters, 16), rank=0, size=3),
    "worker": Case(lambda parameters: ParameterServer(parameters, 16), rank=1, size=3),
}


def traced(case: Case) -> str:
    trace, model = Trace(), make_model()
    trace.line("made")
    ledger = TracedLedger(trace)
    group = TracedGroup(ledger, case.rank, case.size)
    shards = None
    if case.copies > 1:
        size = case.size // case.copies
        shards = ShardGroups(
            TracedGroup(ledger, case.rank % size, size, "shard"),
            TracedGroup(ledger, case.rank // size, case.copies, "copies"),
        )
    parameters = set_of(model, group, shards=shards)
    options: dict[str, Any] = {}
    if case.host is not None:
        options["host"] = HostPlace(PretendedBoundary(ledger), **case.host)
    sharing = case.make(parameters, **options)
    trace_steps(trace, sharing, model, case.microbatches, in_backward=case.in_backward)
    sharing.close()
    return trace.text()


def is_golden(name: str) -> bool:
    return traced(CASES[name]) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


# All cases of a kind are one test: those who choose a few tests for a line then choose all of them.


def test_zero_does_what_its_golden_files_say() -> None:
    names = [name for name, case in CASES.items() if name.startswith("zero") and case.host is None]
    assert [name for name in names if not is_golden(name)] == []


def test_weights_on_the_host_come_and_go_as_their_golden_files_say() -> None:
    names = [name for name, case in CASES.items() if case.host is not None]
    assert [name for name in names if not is_golden(name)] == []


def test_whole_gradients_are_summed_as_their_golden_files_say() -> None:
    names = [name for name in CASES if not name.startswith("zero")]
    assert [name for name in names if not is_golden(name)] == []


def test_golden_files_are_those_of_the_cases() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == CASES.keys()


if __name__ == "__main__":
    from echelon.collectives import buffer_layout

    buffer_layout.ALIGNMENT = 1  # as the fixture has it
    for name, case in CASES.items():
        (GOLDEN / f"{name}.txt").write_text(traced(case), encoding="utf-8")
