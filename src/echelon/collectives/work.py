"""Work: an operation that a group has begun."""

from abc import ABC, abstractmethod


class Work(ABC):
    """An operation that a subclass of Group has begun."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the operation is complete; over NCCL, when the current stream waits for it."""

    def in_background(self) -> None:  # noqa: B027 (most operations advance anyway)
        """Advance it while its caller does other work."""

    def done_at(self) -> float | None:
        """When it was complete (time.perf_counter); None if only the return of `wait` is known."""
        return None

    def done(self) -> bool:
        """Whether it is known to be complete; does not wait."""
        return False
