"""Step observers: what they hear, in which order, and a memory saver that is no part of the library."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.parallel.observer import (
    BackwardPass,
    ForwardPass,
    LossPass,
    Observers,
    Slot,
    StepObserver,
)
from tests.cases import adamw
from tests.contract_models import class_loss

Warm = Callable[[int], Ranks]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator).double(), torch.randint(5, (8,), generator=generator)


class SavedBytes(StepObserver):
    """A toy memory saver: keeps what autograd saves in float32, and counts the bytes that it holds."""

    def __init__(self) -> None:
        self.most = self.held = 0

    def around_pass(self, forward: ForwardPass) -> AbstractContextManager[Any] | None:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack) if forward.trains else None

    def _pack(self, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        small = tensor.float() if tensor.dtype == torch.float64 else tensor
        self.held += small.nbytes
        self.most = max(self.most, self.held)
        return small, tensor.dtype

    def _unpack(self, saved: tuple[Tensor, torch.dtype]) -> Tensor:
        small, dtype = saved
        self.held -= small.nbytes
        return small.to(dtype)


def saved_bytes(plan: str) -> tuple[int, int, float]:
    saver = SavedBytes()
    with echelon.parallelize(model(), plan, optimizer=adamw, loss=class_loss) as engine:
        plain = engine.step(engine.local(batch())).loss
        engine.observe(saver)
        engine.step(engine.local(batch()))
        engine.evaluate(engine.local(batch()))
        return saver.most, saver.held, plain


@pytest.mark.parametrize("plan", ["microbatches=2", "pipeline=2 microbatches=4 schedule=gpipe"])
def test_a_memory_saver_from_outside_sees_every_pass(plan: str, warm_ranks: Warm) -> None:
    ranks = 2 if "pipeline" in plan else 1
    plan = f"{plan} precision=fp64"
    found = warm_ranks(2).run(saved_bytes, plan) if ranks == 2 else [saved_bytes(plan)]
    for most, held, _ in found:
        assert most > 0
        assert held == 0, "each tensor that was packed is unpacked in the backward pass"
    if ranks == 1:
        one, _, _ = saved_bytes("data=1 precision=fp64")
        (most, _, _) = found[0]
        assert most < one, "of two microbatches, one is held at a time"


class Passes(StepObserver):
    """Counts forward passes of training and of evaluation, and what was abandoned."""

    def __init__(self) -> None:
        self.slots: list[tuple[Slot, bool]] = []
        self.num_abandoned = 0

    def around_pass(self, forward: ForwardPass) -> None:
        self.slots.append((forward.slot, forward.trains))

    def abandon(self) -> None:
        self.num_abandoned += 1


def test_every_pass_is_told_and_a_failure_too() -> None:
    passes, built = Passes(), model()
    with echelon.parallelize(
        built, "microbatches=2 precision=fp64", optimizer=adamw, loss=class_loss, audit="off"
    ) as engine:
        engine.step(batch())
        engine.observe(passes)
        engine.step(batch())
        engine.evaluate(batch())
        slots = [(0, 0), (0, 1)]
        assert passes.slots == [(slot, True) for slot in slots] + [(slot, False) for slot in slots]
        known = list(engine._setup.observers._all)
        for fails in (lambda *_: 1 / 0, lambda *_: "no measure"):
            with pytest.raises((ZeroDivisionError, UserError)):
                engine.evaluate(batch(), fails)
        assert passes.num_abandoned == 2
        assert engine._setup.observers._all == known, "a measure that fails leaves no observer behind"


class Listener(StepObserver):
    """Writes down every event."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def before_step(self) -> None:
        self.heard.append("step")

    def around_pass(self, forward: ForwardPass) -> AbstractContextManager[None]:
        return self._within(f"pass {forward.slot}")

    def around_layers(self, forward: ForwardPass) -> AbstractContextManager[None]:  # noqa: ARG002
        return self._within("layers")

    def around_loss(self, forward: ForwardPass) -> AbstractContextManager[None]:  # noqa: ARG002
        return self._within("loss")

    @contextmanager
    def _within(self, name: str) -> Iterator[None]:
        self.heard.append(f"{name}(")
        yield
        self.heard.append(")")

    def after_loss(self, loss: LossPass) -> None:
        assert loss.num_samples == len(loss.targets)
        self.heard.append("loss of 4")

    def before_backwards(self, tally: Tensor) -> None:
        self.heard.append(f"backwards, count {tally[1]:g}")

    def before_backward(self, backward: BackwardPass) -> None:
        self.heard.append(f"{backward.half} {backward.slot}(")

    def after_backward(self, backward: BackwardPass) -> None:  # noqa: ARG002
        self.heard.append(")")

    def before_reduce(self) -> None:
        self.heard.append("reduce")

    def after_passes(self) -> None:
        self.heard.append("passes done")

    def check_first_step(self) -> None:
        self.heard.append("check")

    def before_update(self) -> None:
        self.heard.append("update(")

    def after_update(self, skipped: bool | Tensor) -> None:
        self.heard.append(f"), skipped {skipped}")

    def after_step(self) -> None:
        self.heard.append("step done")

    def abandon(self) -> None:
        self.heard.append("abandon")


def test_a_step_tells_its_events_in_order() -> None:
    listener = Listener()
    with echelon.parallelize(
        model(), "microbatches=2 precision=fp64", optimizer=adamw, loss=class_loss, audit="off"
    ) as engine:
        engine.observe(listener)
        engine.step(batch())
        first, listener.heard = listener.heard, []
        engine.step(batch())
    one = "pass (0, {0})( layers( ) loss( ) loss of 4 ) {1}both (0, {0})( )"
    expected = " ".join(
        [
            "step",
            one.format(0, "backwards, count 4 "),
            one.format(1, ""),
            "reduce passes done check update( ), skipped False step done",
        ]
    )
    assert " ".join(first) == expected
    assert " ".join(listener.heard) == expected.replace("check ", ""), "only the first step is checked"


def test_an_observer_may_refuse_the_first_step() -> None:
    class Refusing(StepObserver):
        def check_first_step(self) -> None:
            raise UserError("not this one")

    built = model()
    with echelon.parallelize(built, "data=1 precision=fp64", optimizer=adamw, loss=class_loss) as engine:
        before = {name: tensor.clone() for name, tensor in engine.full_state_dict().items()}
        refusing = Refusing()
        engine.observe(refusing)
        with pytest.raises(UserError, match="not this one"):
            engine.step(batch())
        assert all(before[name].equal(tensor) for name, tensor in engine.full_state_dict().items())


def test_only_what_is_overridden_is_asked() -> None:
    asked: list[str] = []

    class Storing(StepObserver):
        def store(self, slot: Slot) -> None:
            asked.append(f"store {slot}")

    observers = Observers()
    assert all(not listeners for listeners in observers._by_event.values())
    storing = Storing()
    observers.add(storing)
    assert [event for event, listeners in observers._by_event.items() if listeners] == ["store"]
    observers.tell("store", (1, 2))
    with observers.without(Storing):
        observers.tell("store", (1, 3))
    observers.remove(storing)
    observers.tell("store", (1, 4))
    assert asked == ["store (1, 2)"]


def test_contexts_are_entered_from_the_first_to_the_last() -> None:
    order: list[str] = []

    class Around(StepObserver):
        def __init__(self, name: str) -> None:
            self.name = name

        @contextmanager
        def _context(self) -> Iterator[None]:
            order.append(f"+{self.name}")
            yield
            order.append(f"-{self.name}")

        def around_pass(self, forward: ForwardPass) -> AbstractContextManager[None] | None:
            return self._context() if forward.trains or self.name != "b" else None

    observers = Observers()
    for name in "bc":
        observers.add(Around(name))
    observers.add(Around("a"), outermost=True)
    for trains in (True, False):
        with observers.around("around_pass", ForwardPass((0, 0), None, None, None, 1, trains)):
            order.append("pass")
    assert order == ["+a", "+b", "+c", "pass", "-c", "-b", "-a", "+a", "+c", "pass", "-c", "-a"]
