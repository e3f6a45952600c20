"""Where in the training a forward pass is: what keyed dropout asks.

A place is open for the thread that opened it. The backward pass may run in another: what makes
activations again there captures `current()` in the forward pass and puts it back with `restore`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Place:
    """A step, and the samples that the pass holds: those from `first_sample` on, along dim 0."""

    seed: int
    step: int
    first_sample: int
    uses: Mapping[int, int] = field(default_factory=dict)  # how often each layer has drawn here


@dataclass
class _Open:
    place: Place
    uses: Counter[int]


_OPEN: ContextVar[_Open | None] = ContextVar("echelon.dropout", default=None)


@contextmanager
def scope(*, seed: int, step: int, first_sample: int) -> Iterator[None]:
    """Around one forward pass of the samples from `first_sample` of the global batch on."""
    with restore(Place(seed, step, first_sample)):
        yield


@contextmanager
def restore(place: Place | None) -> Iterator[None]:
    """Around a forward pass that is made again, or goes on: as if at the moment of `current()`."""
    token = _OPEN.set(None if place is None else _Open(place, Counter(place.uses)))
    try:
        yield
    finally:
        _OPEN.reset(token)


def current() -> Place | None:
    """The place that is open here, with how far it has come; None outside every scope."""
    opened = _OPEN.get()
    if opened is None:
        return None
    place = opened.place
    return Place(place.seed, place.step, place.first_sample, dict(opened.uses))


def next_use(layer: int) -> tuple[Place, int] | None:
    """The place that is open, and how often `layer` has drawn there before: counts this one."""
    opened = _OPEN.get()
    if opened is None:
        return None
    opened.uses[layer] += 1
    return opened.place, opened.uses[layer] - 1
