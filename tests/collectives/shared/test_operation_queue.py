"""Operations run in the order of their queue, and nothing runs after an error."""

import gc
import weakref
from collections.abc import Generator
from types import coroutine

import pytest

from echelon.collectives.shared.operation_queue import Operation, OperationQueue, Steps
from echelon.collectives.shared.slots import Wait
from echelon.launching import PeerLost


class RecordingRunner:
    """Advances nothing, and records what it is asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def wait_for(self, operation: Operation, timeout: float) -> bool:
        self.calls.append(f"wait_for {timeout:.0f}")
        return operation.is_over()

    def poll(self, operation: Operation) -> None:  # noqa: ARG002
        self.calls.append("poll")

    def run_in_background(self, operation: Operation) -> None:
        operation.is_background = True

    def wake_waiters(self, operation: Operation) -> None:  # noqa: ARG002
        self.calls.append("wake_waiters")

    def fail(self, error: Exception) -> None:
        self.calls.append(f"fail: {error}")


@coroutine
def pause(reason: Wait) -> Generator[Wait]:
    yield reason


async def steps(log: list[str], name: str, *reasons: Wait, error: Exception | None = None) -> None:
    for number, reason in enumerate(reasons):
        log.append(f"{name}{number}")
        await pause(reason)
    if error is not None:
        raise error
    log.append(f"{name} over")


def queue_of(*coroutines: Steps, is_lazy: bool = False) -> tuple[OperationQueue, list[Operation]]:
    queue, runner = OperationQueue(is_lazy=is_lazy), RecordingRunner()
    operations = [Operation(each, "rank 0 of 2 along data", 5.0, runner) for each in coroutines]
    queue.operations.extend(operations)
    return queue, operations


NEXT = Wait.FOR_NEXT_STEP


def test_one_begins_when_the_one_before_is_over() -> None:
    log: list[str] = []
    queue, (first, second) = queue_of(steps(log, "a", NEXT, NEXT), steps(log, "b", NEXT))
    queue.advance()
    assert (log, queue.number) == (["a0"], 0)
    queue.advance()
    queue.advance()
    assert log == ["a0", "a1", "a over", "b0"]
    assert (queue.number, first.is_over(), second.is_over()) == (1, True, False)
    queue.advance()
    assert (queue.number, len(queue.operations)) == (2, 0)
    first.wait()
    assert first.done_at() <= second.done_at()  # type: ignore[operator]


def test_an_error_ends_the_queue() -> None:
    log: list[str] = []
    failing = steps(log, "a", error=PeerLost("rank 1 is gone"))
    queue, (first, second) = queue_of(failing, steps(log, "b"))
    error = queue.advance()
    assert isinstance(error, PeerLost)
    assert log == [], "nothing runs after it"
    queue.fail(error)
    for operation in (first, second):
        with pytest.raises(PeerLost, match="rank 0 of 2 along data lost a peer: rank 1 is gone"):
            operation.wait()


def test_an_error_does_not_keep_the_memory_of_its_operation() -> None:
    """Else a closed link kept its mapped memory, through the frames of the error that ended it."""

    class Memory:
        pass

    async def fails(memory: Memory) -> None:
        assert memory
        try:
            raise OSError("unreadable")
        except OSError as cause:
            raise RuntimeError("failed") from cause

    memory = Memory()
    alive = weakref.ref(memory)
    queue, (operation,) = queue_of(fails(memory))
    del memory
    gc.disable()
    try:
        error = queue.advance()
        assert alive() is None
    finally:
        gc.enable()
    assert operation.error is error


def test_a_timeout_fails_the_runner() -> None:
    _, (operation,) = queue_of(steps([], "a", NEXT))
    with pytest.raises(PeerLost, match="along data timed out waiting for its peers after 5 seconds"):
        operation.wait()
    calls = operation._runner.calls  # type: ignore[attr-defined]
    assert calls[0] == "wait_for 5"
    assert calls[1].startswith("fail: rank 0 of 2 along data timed out")
    operation.abandon(RuntimeError())


def test_what_needs_the_background_thread() -> None:
    """Only what its caller left behind; not lazy queues; not a send that only waits for its readers."""
    queue, (operation,) = queue_of(steps([], "a", NEXT, Wait.FOR_READERS))
    queue.advance()
    assert not queue.needs_background()
    operation.in_background()
    assert queue.needs_background()
    queue.advance()
    assert operation.wait_reason is Wait.FOR_READERS
    assert not queue.needs_background()
    other = Operation(steps([], "b", NEXT), "", 5.0, RecordingRunner())
    queue.operations.append(other)
    assert queue.needs_background(), "the second can go on when the first is read"
    queue.fail(RuntimeError())

    lazy, (receive,) = queue_of(steps([], "a", NEXT), is_lazy=True)
    receive.in_background()
    assert not lazy.needs_background()
    lazy.fail(RuntimeError())
