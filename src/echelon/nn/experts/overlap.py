"""Work that runs while the tokens of a layer are on their way to their experts.

    with beside(lambda: shared(x)) as work:     the layer offers it
        mixed = experts(…)                      who sends tokens calls `run_beside()` while they travel
    return mixed + work.result()                nobody did: it runs here

Neither of the two knows the other, nor what is wrapped around the experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import final

from torch import Tensor


@final
class Work:
    """Runs once, when it is asked for first."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._result: Tensor | None = None

    def run(self) -> None:
        if self._result is None:
            token = _WORK.set(None)  # experts inside of it wait for their own tokens
            try:
                self._result = self._compute()
            finally:
                _WORK.reset(token)

    def result(self) -> Tensor:
        self.run()
        assert self._result is not None
        return self._result


_WORK: ContextVar[Work | None] = ContextVar("echelon.nn.experts.overlap", default=None)


@contextmanager
def beside(compute: Callable[[], Tensor]) -> Iterator[Work]:
    """Offer `compute` to whoever waits inside."""
    work = Work(compute)
    token = _WORK.set(work)
    try:
        yield work
    finally:
        _WORK.reset(token)


def run_beside() -> None:
    """Run what a layer around has offered, if there is any and it has not run yet."""
    work = _WORK.get()
    if work is not None:
        work.run()
