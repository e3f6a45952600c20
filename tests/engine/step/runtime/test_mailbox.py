"""No order of messages deadlocks over NCCL, also where hosts wait for their devices: message_order.py."""

from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
from torch import Tensor

from echelon.collectives import Edge, Edges, Handle
from echelon.collectives.comparison import _content
from echelon.plan import ASYNCHRONOUS_SCHEDULES, Plan
from echelon.program import Program
from tests.engine.step.runtime.message_order import Operation, Simulation, operations_of
from tests.engine.step.runtime.number_training import (
    Run,
    check_training,
    continuous_runs,
    edges_of_mesh,
    flushed_runs,
)
from tests.nccl_like import Deadlock, NcclMesh

CHAINS = ("naive", "gpipe", "1f1b", "zero-bubble", *ASYNCHRONOUS_SCHEDULES)
RINGS = ("interleaved chunks=2", "interleaved chunks=3")
FILE = "tests/program/golden/1f1b.txt"  # of 4 stages and 5 microbatches


def plans(schedule: str, stages: int, numbers: Iterable[int]) -> Iterator[str]:
    """With these numbers of microbatches, as far as they are legal."""
    for microbatches in numbers:
        if schedule == "pipedream-2bw" and microbatches < stages:
            continue
        if "interleaved" in schedule and microbatches % stages:
            continue
        yield f"pipeline={stages} microbatches={microbatches} schedule={schedule}"


def runs_of(text: str) -> list[Run]:
    plan = Plan.parse(text)
    return (flushed_runs if plan.flushes else continuous_runs)(plan, 1)


def lists_of(plan: str) -> list[list[Operation]]:
    runs = runs_of(plan)
    return [list(operations_of(runs, rank)) for rank in range(len(runs[0].program.ranks))]


@pytest.mark.quick_cases(25)
@pytest.mark.parametrize("stages", range(2, 9))
@pytest.mark.parametrize("schedule", [*CHAINS, *RINGS])
def test_messages_of_every_schedule_end(schedule: str, stages: int) -> None:
    """In a ring (interleaved) hosts may wait for their devices as long as messages fit into NCCL's buffers:
    each rank may have sent to the next, and wait until that one receives, which does the same."""
    check_messages(plans(schedule, stages, (1, 2, stages, stages + 1, 2 * stages, 3 * stages)))


@pytest.mark.slow
@pytest.mark.parametrize("stages", range(2, 9))
@pytest.mark.parametrize("schedule", [*CHAINS, *RINGS])
def test_messages_end_with_any_number_of_microbatches(schedule: str, stages: int) -> None:
    check_messages(plans(schedule, stages, range(1, 3 * stages + 1)))


def check_messages(texts: Iterable[str]) -> None:
    for plan in texts:
        lists = lists_of(plan)
        Simulation(lists).run()
        Simulation(lists, waits=True, buffered="interleaved" in plan).run()


def test_messages_of_a_file_end() -> None:
    plan = f"pipeline=4 microbatches=5 schedule={FILE}"
    Simulation(lists_of(plan), waits=True).run()


# What the simulation finds.

PLAN = "pipeline=4 microbatches=8 schedule=pipedream-2bw"


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", *ASYNCHRONOUS_SCHEDULES, *RINGS])
def test_receives_that_are_queued_ahead_hang_where_hosts_wait(schedule: str) -> None:
    """PipeDream-2BW hung over the real NCCL in its first norm, whose kernels were loaded there."""
    lists = lists_of(f"pipeline=4 microbatches=8 schedule={schedule}")
    Simulation(lists, ahead=True).run()
    with pytest.raises(Deadlock, match="waits in compute"):
        Simulation(lists, ahead=True, waits=True, buffered=True).run()


def swapped(operations: list[Operation], first: str, second: str) -> list[Operation]:
    """Two neighbours exchanged, the first of their kinds."""
    place = next(
        place
        for place in range(len(operations) - 1)
        if (operations[place].kind, operations[place + 1].kind) == (first, second)
    )
    return [*operations[:place], operations[place + 1], operations[place], *operations[place + 2 :]]


def test_a_receive_before_the_send_that_it_answers_is_found() -> None:
    lists = [list(each) for each in lists_of(PLAN)]
    lists[0] = swapped(lists[0], "send", "receive")
    Simulation(lists).run()  # it answers an earlier one
    lists = [list(each) for each in lists_of("pipeline=2 microbatches=1 schedule=naive")]
    lists[0] = swapped(lists[0], "send", "receive")
    with pytest.raises(Deadlock, match="rank 0 waits in receive RG0 of stage 0"):
        Simulation(lists).run()


def test_a_norm_over_all_stages_in_the_middle_of_a_pipeline_is_found() -> None:
    """Stages of a pipeline that never drains come to their updates at different times."""
    lists = [
        [o._replace(kind="meet") if "NORM" in o.label else o for o in operations]
        for operations in lists_of(PLAN)
    ]
    with pytest.raises(Deadlock, match="ranks meet in different collectives"):
        Simulation(lists).run()


def test_two_ranks_that_send_and_then_wait_for_their_devices_are_found() -> None:
    kinds = ("send", "compute", "receive")
    ends = [[Operation(kind, 1 - rank, "") for kind in kinds] for rank in range(2)]
    Simulation(ends, waits=True, buffered=True).run()
    with pytest.raises(Deadlock):
        Simulation(ends, waits=True).run()


# The lists are what the interpreter issues.


Record = list[tuple[str, int, str]]  # send or receive, the other rank, and what debug=true compares


class RecordedEdge(Edge):
    """Writes down what is queued on the device; `other` is the rank at the other end."""

    record: Record
    other: int

    def send(self, memory: Tensor, subject: str) -> Handle:
        self.record.append(("send", self.other, _content.get()))
        return super().send(memory, subject)

    def recv(self, memory: Tensor, subject: str) -> Handle:
        self.record.append(("receive", self.other, _content.get()))
        return super().recv(memory, subject)


def contents(record: Record, kind: str, peer: int) -> list[str]:
    return [content for name, other, content in record if (name, other) == (kind, peer)]


def recorded(edges: dict[int, Edge], record: Record) -> dict[int, Edge]:
    copies = {}
    for peer, edge in edges.items():
        copies[peer] = copy = RecordedEdge(*edge)
        copy.record, copy.other = record, peer
    return copies


def queued(operations: list[Operation]) -> list[tuple[str, int]]:
    """Sends and receives in the order in which a device queues them: a receive once."""
    posted: Counter[int] = Counter()
    result = []
    for kind, peer, _ in operations:
        if kind == "receive" and posted[peer]:
            posted[peer] -= 1
        elif kind in ("send", "receive", "post"):
            result.append(("send" if kind == "send" else "receive", peer))
            posted[peer] += kind == "post"
    return result


@pytest.mark.parametrize(
    "plan",
    [
        *(f"pipeline=3 microbatches=4 schedule={schedule}" for schedule in CHAINS),
        "pipeline=2 microbatches=4 schedule=interleaved chunks=2",
        "pipeline=3-1 microbatches=4",
    ],
)
def test_the_interpreter_issues_these_messages_in_this_order(plan: str) -> None:
    """And a host may wait for its device wherever it computes."""
    records: dict[int, Record] = {}

    def make_edges(mesh: NcclMesh, program: Program) -> Edges:
        edges, record = edges_of_mesh(mesh, program), records.setdefault(mesh.rank, [])
        return Edges(recorded(edges.outgoing, record), recorded(edges.incoming, record))

    check_training(plan, make_edges, waits="interleaved" not in plan)
    for rank, operations in enumerate(lists_of(plan)):
        assert [each[:2] for each in records[rank]] == queued(operations)
        for peer in {each[1] for each in records[rank]}:
            sent = contents(records[rank], "send", peer)
            assert sent == contents(records[peer], "receive", rank)
            assert all(sent)
