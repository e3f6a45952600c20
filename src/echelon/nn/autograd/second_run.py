"""A second run of a forward pass: what must not happen twice happens in the first run, and is replayed.

    first run       once(compute)   computes, and notes the result on the run's tape
    second run      once(compute)   the result on the tape
    elsewhere       once(compute)   computes

A message between replicas that only the first run sends is one example. A choice that later calls would make
in another way is another.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, final

T = TypeVar("T")


@final
class Tape:
    """The results of one run, in order."""

    def __init__(self) -> None:
        self._results: list[Any] = []

    def record(self) -> AbstractContextManager[None]:
        """Record the first run inside."""
        return _reading(_Reader(self._results, None))

    def replay(self) -> AbstractContextManager[None]:
        """Replay the results in the second run inside, which may be in another thread."""
        return _reading(_Reader(self._results, iter(self._results)))


class TapeEndedError(Exception):
    """A second run asks for a result that the first has not computed."""


_END: Any = object()


class _Reader(NamedTuple):
    results: list[Any]
    replayed: Iterator[Any] | None


_READER: ContextVar[_Reader | None] = ContextVar("echelon.nn.autograd.second_run", default=None)


@contextmanager
def _reading(reader: _Reader) -> Iterator[None]:
    token = _READER.set(reader)
    try:
        yield
    finally:
        _READER.reset(token)


def once(compute: Callable[[], T]) -> T:
    """Return the result of `compute`, or that of this point of the first run."""
    reader = _READER.get()
    if reader is None:
        return compute()
    if reader.replayed is not None:
        replayed: T = next(reader.replayed, _END)
        if replayed is _END:
            raise TapeEndedError
        return replayed
    result = compute()
    reader.results.append(result)
    return result
