"""The place of a forward pass in the training: the step and the samples, which keyed dropout asks for.

A scope is open for the thread that opened it. The backward pass may run in another thread: code that
computes activations again there calls `current()` in the forward pass and `restore` in the backward pass.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, final

from torch import Tensor

from echelon.errors import UserError
from echelon.nn.hashing import hash_of, hash_on_device


class Interception(Protocol):
    """Makes the numbers that functions of torch draw."""

    def intercepted(self) -> AbstractContextManager[None]:
        """Make the numbers of a pass inside of a scope."""
        ...


@dataclass(frozen=True)
class TrainingPosition:
    """A step, and the samples of the pass: those from `first_sample` on, along dim 0."""

    seed: int
    step: int | Tensor  # on the device in passes that are recorded: a replay reads the step of then
    first_sample: int | Tensor  # where replicas count on the device, it stays there
    uses: Mapping[int, int] = field(default_factory=dict)  # how often each layer has drawn here
    samples: int = 0  # of the pass, where draws are intercepted
    draws: Interception | None = None  # around the pass

    def key(self, layer: int, use: int) -> int | Tensor:
        """Return the hash of seed, step, layer, and how often the layer has drawn here before."""
        start = self._start
        if isinstance(start, Tensor):
            return hash_on_device(layer, use, start=start)
        return hash_of(layer, use, start=start)

    @cached_property
    def _start(self) -> int | Tensor:
        seed = hash_of(self.seed)
        if isinstance(self.step, Tensor):
            return hash_on_device(seed, start=self.step)
        return hash_of(self.step, start=seed)


@dataclass
class _Scope:
    position: TrainingPosition
    uses: Counter[int]


_SCOPE: ContextVar[_Scope | None] = ContextVar("echelon.nn.dropout", default=None)
_SAMPLES: ContextVar[int | None] = ContextVar("echelon.nn.dropout.samples", default=None)


@contextmanager
def scope(
    *,
    seed: int,
    step: int | Tensor,
    first_sample: int | Tensor,
    samples: int = 0,
    draws: Interception | None = None,
) -> Iterator[None]:
    """Open a scope for one forward pass of the samples from `first_sample` of the global batch on.

    These are so many `samples`, unless `CountedSamples` says how many. `draws` makes the numbers that
    functions of torch draw.
    """
    counted = _SAMPLES.get()
    number = samples if counted is None else counted
    with restore(TrainingPosition(seed, step, first_sample, samples=number, draws=draws)):
        yield


@contextmanager
def restore(position: TrainingPosition | None) -> Iterator[None]:
    """Repeat or continue a forward pass inside: masks are drawn as right after `current()`."""
    token = _SCOPE.set(None if position is None else _Scope(position, Counter(position.uses)))
    draws = None if position is None else position.draws
    try:
        with nullcontext() if draws is None else draws.intercepted():
            yield
    finally:
        _SCOPE.reset(token)


def current() -> TrainingPosition | None:
    """Return the position of the open scope, with the number of draws so far; None outside every scope."""
    opened = _SCOPE.get()
    if opened is None:
        return None
    return replace(opened.position, uses=dict(opened.uses))


def next_use(layer: int) -> tuple[TrainingPosition, int] | None:
    """Return the position of the open scope, and how often `layer` has drawn before; count this draw."""
    opened = _SCOPE.get()
    if opened is None:
        return None
    count_uses(layer, 1)
    return opened.position, opened.uses[layer] - 1


def count_uses(layer: int, count: int) -> None:
    """Tell the open scope that `layer` has drawn there so many times more."""
    opened = _SCOPE.get()
    assert opened is not None
    opened.uses[layer] += count


@final
class CountedSamples:
    """Tell `check_samples` how many samples the forward pass inside has; it runs in `scope`, if given."""

    def __init__(self, number: int, scope: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._number, self._open = number, scope

    def __enter__(self) -> None:
        self._token = _SAMPLES.set(self._number)
        try:
            self._scope = self._open()
            self._scope.__enter__()
        except BaseException:
            _SAMPLES.reset(self._token)
            raise

    def __exit__(self, *error: Any) -> bool | None:
        try:
            return self._scope.__exit__(*error)
        finally:
            _SAMPLES.reset(self._token)


def check_samples(what: str, shape: Sequence[int]) -> None:
    """Refuse an input whose dim 0 has not the samples of the pass: what is counted by sample would depend on
    how the batch is divided."""
    number = _SAMPLES.get()
    if number is not None and shape[0] != number:
        raise UserError(
            f"{what} is that of each sample, and dim 0 of the input {list(shape)} does not count samples, of "
            f"which this pass has {number}: give the gate [samples, positions, width]"
        )
