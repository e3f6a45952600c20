"""Step observers: what sees the passes and the update of a training step without being a part of them.

Memory savers, the balance of experts, meters and checks are observers. One of your own is a subclass of
`StepObserver` that overrides what it needs, given to `engine.observe`:

    before_step
      around_pass( around_layers(layers of the stage) around_loss(loss) after_loss )     each forward pass
      before_backwards                                                 no forward pass is left, or the first
      before_backward  after_backward                                  backward pass comes
      before_reduce                                                    gradients are summed over ranks
    after_passes   check_first_step                                    may refuse the step
    before_update   after_update
    after_step                                                         or abandon, if something has raised
    after_timing                                                       metrics are there; may take its time
    after_close                                                        no step follows
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, final

from torch import Tensor

Slot = tuple[int, int]  # stage, microbatch


class ForwardPass(NamedTuple):
    """One stage takes one microbatch forward. `value` is what the stage is called with, `inputs` and
    `targets` are the microbatch's. `weight` is 0 where samples do not count; an evaluation does not train."""

    slot: Slot
    value: Any
    inputs: Any
    targets: Any
    weight: int
    trains: bool


class LossPass(NamedTuple):
    """The loss of one microbatch was computed: its total, detached, and what it was computed from."""

    output: Any
    targets: Any
    total: Tensor
    num_samples: int
    counts: bool


class BackwardPass(NamedTuple):
    """One stage takes one microbatch back, or a half of the way. `has_work` is false where no input of the
    stage wants a gradient, so that the half for inputs computes nothing."""

    slot: Slot
    half: Literal["both", "inputs", "weights"]
    has_work: bool


class StepObserver:
    """Override what is needed; a method that is not overridden costs nothing."""

    def before_step(self) -> None:
        """A training step begins; nothing has run."""

    def around_pass(self, forward: ForwardPass) -> AbstractContextManager[None] | None:  # noqa: ARG002
        """Return a context for a forward pass and its loss, if there is one."""
        return None

    def around_layers(self, forward: ForwardPass) -> AbstractContextManager[None] | None:  # noqa: ARG002
        """Return a context for the layers of the stage alone."""
        return None

    def around_loss(self, forward: ForwardPass) -> AbstractContextManager[None] | None:  # noqa: ARG002
        """Return a context for the loss alone."""
        return None

    def after_loss(self, loss: LossPass) -> None:
        """The loss of a microbatch is known; on ranks of the last stage."""

    def before_backwards(self, tally: Tensor) -> None:
        """All forward passes are done here, or the first backward pass comes. `tally`: loss, count."""

    def store(self, slot: Slot) -> None:
        """The program stores what a forward pass has saved (STORE)."""

    def fetch(self, slot: Slot) -> None:
        """The program fetches it for a backward pass (FETCH)."""

    def before_backward(self, backward: BackwardPass) -> None:
        """A backward pass begins."""

    def after_backward(self, backward: BackwardPass) -> None:
        """It is done."""

    def before_reduce(self) -> None:
        """The gradients of a stage are complete here, and summed over ranks next."""

    def before_unit(self) -> None:
        """The gradients of a unit are summed over ranks; it is updated next, in the backward pass."""

    def after_passes(self) -> None:
        """All passes are done. The ranks of a stage may talk to each other."""

    def check_first_step(self) -> None:
        """Raise, on all ranks if on one, to refuse the step before its update; until one was not refused."""

    def before_update(self) -> None:
        """Weights are about to change."""

    def after_update(self, skipped: bool | Tensor) -> None:
        """Weights have changed, or the update was skipped; a tensor is on the device."""

    def after_step(self) -> None:
        """The step is done on the host; a device may still be at it."""

    def after_timing(self, number: int, metrics: Any) -> None:
        """Step `number`, from 1 on, is timed and has its metrics: work here is in no step's time."""

    def after_close(self, *, failed: bool) -> None:
        """The engine is closed, by itself or because something has raised: no step follows."""

    def abandon(self) -> None:
        """A pass has raised: let go of what belongs to passes that will not end."""


_NOTHING: AbstractContextManager[Any] = nullcontext()
_EVENTS = tuple(name for name, value in vars(StepObserver).items() if callable(value))


@final
class Observers:
    """The observers of one engine, asked in the order in which they were added."""

    def __init__(self) -> None:
        self._all: list[StepObserver] = []
        self._sort()

    def add(self, observer: StepObserver, *, outermost: bool = False) -> None:
        self._all = [observer, *self._all] if outermost else [*self._all, observer]
        self._sort()

    def remove(self, observer: StepObserver) -> None:
        self._all.remove(observer)
        self._sort()

    def remove_kind(self, kind: type[StepObserver]) -> None:
        self._all = [each for each in self._all if not isinstance(each, kind)]
        self._sort()

    @contextmanager
    def without(self, *kinds: type[StepObserver]) -> Iterator[None]:
        """Inside, observers of these kinds see nothing."""
        every = self._all
        self._all = [each for each in every if not isinstance(each, kinds)]
        self._sort()
        try:
            yield
        finally:
            self._all = every
            self._sort()

    def _sort(self) -> None:
        """Find out who overrides what, so that a step asks no one else."""
        self._by_event: dict[str, list[Callable[..., Any]]] = {
            event: [
                getattr(each, event)
                for each in self._all
                if getattr(type(each), event) is not getattr(StepObserver, event)
            ]
            for event in _EVENTS
        }

    def hears(self, event: str) -> bool:
        """Return whether there is an observer to tell of it."""
        return bool(self._by_event[event])

    def has_kind(self, kind: type[StepObserver]) -> bool:
        return any(isinstance(each, kind) for each in self._all)

    def is_heard(self, events: Iterable[str], but: tuple[type[StepObserver], ...]) -> bool:
        """Return whether an observer hears any of these events, `but` for these kinds."""
        hearing = (getattr(hear, "__self__", None) for event in events for hear in self._by_event[event])
        return not all(isinstance(each, but) for each in hearing)

    def tell(self, event: str, *args: object, **options: object) -> None:
        for hear in self._by_event[event]:
            hear(*args, **options)

    def around(self, event: str, *args: object) -> AbstractContextManager[Any]:
        """The contexts of all observers, the first outermost."""
        contexts = [each for ask in self._by_event[event] if (each := ask(*args)) is not None]
        if not contexts:
            return _NOTHING
        return contexts[0] if len(contexts) == 1 else _nested(contexts)


@contextmanager
def _nested(contexts: list[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
