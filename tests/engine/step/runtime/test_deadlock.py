"""No schedule deadlocks where operations run in the order of NCCL (see tests/nccl_like)."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.plan import ASYNCHRONOUS_SCHEDULES
from tests.engine.step.runtime.number_training import check_training, edges_of_mesh, one_queue_per_direction
from tests.engine.step.runtime.plan_checks import PlanChecks
from tests.nccl_like import Deadlock


def plans() -> Iterator[str]:
    """Every schedule, with 2 to 8 stages and 1 to 9 microbatches; and with replicated stages."""
    for microbatches in range(1, 10):
        for stages in range(2, 9):
            pipeline = f"pipeline={stages} microbatches={microbatches}"
            for schedule in ("naive", "gpipe", "1f1b", "zero-bubble", "pipedream", "pipedream-vertical"):
                yield f"{pipeline} schedule={schedule}"
            if microbatches >= stages:
                yield f"{pipeline} schedule=pipedream-2bw"
            if microbatches % stages == 0:
                yield f"{pipeline} schedule=interleaved chunks=2"
                yield f"{pipeline} schedule=interleaved chunks=3"
        for replicas in ("3-1", "2-1-1"):
            for schedule in ("naive", "gpipe", "1f1b", "zero-bubble"):
                yield f"pipeline={replicas} microbatches={microbatches} schedule={schedule}"


@pytest.fixture(scope="module")
def plan_checks(request: pytest.FixtureRequest, warm_ranks: Callable[[int], Ranks]) -> PlanChecks:
    """Of the plans whose tests were selected."""
    items = [item for item in request.session.items if item.parent is not None]
    tests = [item for item in items if getattr(item, "function", None) is test_no_schedule_deadlocks]
    return PlanChecks(warm_ranks(2), [test.callspec.params["plan"] for test in tests])  # type: ignore[attr-defined]


def is_quick(plan: str) -> bool:
    """Every schedule and number of stages, with few microbatches, as many as stages, and more."""
    return any(f"microbatches={number} " in plan for number in (1, 4, 8))


@pytest.mark.quick_cases(20)
@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if is_quick(plan) else pytest.mark.slow) for plan in plans()]
)
def test_no_schedule_deadlocks(plan_checks: PlanChecks, plan: str) -> None:
    """Over communicators that are made at their first use, as torch makes them."""
    error = plan_checks.error_of(plan)
    assert error is None, error


SEVERAL = [
    "pipeline=4 microbatches=8 schedule=interleaved chunks=2",
    "pipeline=5 microbatches=6 schedule=1f1b",
    "pipeline=5 microbatches=6 schedule=naive",
    "pipeline=5 microbatches=6 schedule=zero-bubble",
    "pipeline=2-1-1 microbatches=5 schedule=gpipe",
    "pipeline=4 microbatches=3 schedule=pipedream",
    "pipeline=4 microbatches=1 schedule=pipedream-vertical",
    "pipeline=3 microbatches=4 schedule=pipedream-2bw",
]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("plan", SEVERAL)
def test_nor_does_a_longer_training(plan: str) -> None:
    """Two steps in a row, or two drains, around an evaluation."""
    check_training(plan, edges_of_mesh, length=2, lazy=True)


@pytest.mark.quick_cases(6)
@pytest.mark.slow_cases(
    "{'waits_for_sends': False}-pipeline=3 microbatches=4 schedule=pipedream-2bw",
    "{'waits_for_sends': False}-pipeline=4 microbatches=1 schedule=pipedream-vertical",
    "{'waits_for_sends': False}-pipeline=4 microbatches=3 schedule=pipedream",
    "{'waits_for_sends': False}-pipeline=4 microbatches=8 schedule=interleaved chunks=2",
    "{'waits_for_sends': False}-pipeline=5 microbatches=6 schedule=1f1b",
    "{'waits_for_sends': False}-pipeline=5 microbatches=6 schedule=naive",
    "{'waits_for_sends': False}-pipeline=5 microbatches=6 schedule=zero-bubble",
    "{}-pipeline=4 microbatches=8 schedule=interleaved chunks=2",
    "{}-pipeline=5 microbatches=6 schedule=naive",
    "{}-pipeline=5 microbatches=6 schedule=zero-bubble",
)
@pytest.mark.parametrize("plan", SEVERAL)
@pytest.mark.parametrize("options", [{}, {"waits_for_sends": False}, {"lazy": True, "seed": 0}], ids=str)
def test_nor_any_order_of_the_ranks(plan: str, options: dict[str, Any]) -> None:
    """Communicators are made at once; a rank does not wait until all is sent; any rank may run next."""
    check_training(plan, edges_of_mesh, **options)


@pytest.mark.slow_cases(
    "3-1f1b",
    "3-pipedream-2bw",
    "3-pipedream-vertical",
    "3-pipedream",
    "4-1f1b",
    "4-pipedream-2bw",
    "4-pipedream-vertical",
    "4-pipedream",
)
@pytest.mark.parametrize("schedule", ["1f1b", *ASYNCHRONOUS_SCHEDULES])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_between_steps_every_device_comes_to_rest(schedule: str, stages: int) -> None:
    """PipeDream's sends waited for receives of the next step: torch.cuda.synchronize() and a barrier between
    two steps hung, and so did a rank that left."""
    for microbatches in (1, 4) if schedule != "pipedream-2bw" else (4,):
        plan = f"pipeline={stages} microbatches={microbatches} schedule={schedule}"
        check_training(plan, edges_of_mesh, length=2, rests=True)


@pytest.mark.slow_cases("15-1", "8-1")
@pytest.mark.parametrize("pipeline", ["3-1", "8-1", "15-1", "2-1-2"])
def test_stages_of_many_replicas_have_streams_enough(pipeline: str) -> None:
    """torch has 32 streams, which communicators take in turn."""
    check_training(f"pipeline={pipeline} microbatches=16", edges_of_mesh, streams=32)


# What this suite finds when earlier queues are put back.


@pytest.mark.slow_cases(
    "1f1b-passes1-deadlocks1",
    "interleaved chunks=3-passes7-deadlocks7",
    "naive-passes0-deadlocks0",
    "pipedream-2bw-passes5-deadlocks5",
    "pipedream-vertical-passes4-deadlocks4",
)
@pytest.mark.parametrize(
    ("schedule", "passes", "deadlocks"),
    [  # (stages, microbatches)
        ("naive", (3, 1), (3, 2)),
        ("1f1b", (3, 9), (4, 5)),
        ("zero-bubble", (3, 9), (4, 5)),
        ("pipedream", (3, 9), (4, 3)),
        ("pipedream-vertical", (3, 9), (4, 3)),
        ("pipedream-2bw", (3, 9), (4, 4)),
        ("interleaved chunks=2", (2, 8), (3, 3)),
        ("interleaved chunks=3", (2, 8), (3, 3)),
    ],
)
def test_one_queue_per_direction_deadlocks(
    schedule: str, passes: tuple[int, int], deadlocks: tuple[int, int]
) -> None:
    """A receive that is posted ahead from rank r−1 holds up the send to rank r+1, or another receive."""
    for stages, microbatches in (passes, deadlocks):
        plan = f"pipeline={stages} microbatches={microbatches} schedule={schedule}"
        deadlock = pytest.raises(Deadlock, match=r"queue on pipeline.*: recv from .*, (send to|recv from)")
        with deadlock if (stages, microbatches) == deadlocks else nullcontext():
            check_training(plan, one_queue_per_direction)


@pytest.mark.slow_cases("4-1", "8-1-1")
@pytest.mark.parametrize(("pipeline", "streams"), [("2", 1), ("4", 1), ("3-1", 1), ("8-1", 1)])
def test_communicators_that_share_streams_deadlock(
    monkeypatch: pytest.MonkeyPatch, pipeline: str, streams: int
) -> None:
    """See [Note: shared streams] in collectives/process_groups.py, which refuses such plans."""
    plan = f"pipeline={pipeline} microbatches=16"
    monkeypatch.setattr("echelon.collectives.process_groups.NUM_STREAMS", streams)
    with pytest.raises(UserError, match=f"torch has {streams}"):
        check_training(plan, edges_of_mesh, length=2, streams=streams)
    monkeypatch.setattr("echelon.collectives.process_groups.NUM_STREAMS", 100)
    with pytest.raises(Deadlock):
        check_training(plan, edges_of_mesh, length=2, streams=streams)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "pipedream"])
def test_communicators_that_are_made_at_their_first_message_deadlock(schedule: str) -> None:
    """A receive of a gradient makes a communicator, and waits for a rank that waits for the activation."""
    plan = f"pipeline=2 microbatches=2 schedule={schedule}"
    with pytest.raises(Deadlock, match=r"rank 0 waits for the making of pipeline"):
        check_training(plan, one_queue_per_direction, lazy=True)
