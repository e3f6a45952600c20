"""Between the calls of a loop: a pass that raises leaves nothing behind, and what users change by hand is
taken over or refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import echelon
from echelon import UserError
from echelon.engine.engine import Engine
from echelon.launching import Ranks, launch
from tests.cases import sgd

Warm = Callable[[int], Ranks]


class Network(nn.Module):
    """Raises in its forward, or in its backward pass, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.fails_in = ""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if self.fails_in == "forward" and number == 1:
                raise RuntimeError("in the forward pass")
            if self.fails_in == "backward" and number == 1 and x.requires_grad:
                x.register_hook(self._fail)
        return x

    def _fail(self, _: Tensor) -> None:
        raise RuntimeError("in the backward pass")


def model() -> Network:
    torch.manual_seed(0)
    return Network().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(step)
    return torch.randn(4, 6, generator=source).double(), torch.randint(6, (4,), generator=source)


def parallelized(plan: str) -> Engine:
    return echelon.parallelize(
        model(), f"{plan} precision=fp64", optimizer=sgd, loss=F.cross_entropy, smallest_unit=0
    )


def by_batches(engine: Engine, step: int, loss: Any = None) -> None:
    for number in (2 * step, 2 * step + 1):
        engine.forward_backward(engine.local(batch(number)), loss)
    engine.update()


def by_calls(engine: Engine, step: int, loss: Any = F.cross_entropy) -> None:
    for number in (2 * step, 2 * step + 1):
        inputs, targets = engine.local(batch(number))
        engine.backward(loss(engine(inputs), targets))
    engine.update()


def plain() -> dict[str, Tensor]:
    whole = model()
    optimizer = sgd(whole.parameters())
    for step in range(3):
        optimizer.zero_grad()
        for inputs, targets in (batch(2 * step), batch(2 * step + 1)):
            F.cross_entropy(whole(inputs), targets).backward()
        optimizer.step()
    return whole.state_dict()


def fail(output: Tensor, targets: Tensor) -> Tensor:
    raise RuntimeError("in the loss")


@contextmanager
def failing(engine: Engine, place: str) -> Iterator[None]:
    network: Any = engine.module
    network.fails_in = place
    with pytest.raises(RuntimeError, match=f"in the {place}"):
        yield
    network.fails_in = ""


def add_gradients(engine: Engine, loop: Callable[..., None]) -> None:
    """The first half of a step of the loop."""
    inputs, targets = engine.local(batch(9))
    if loop is by_calls:
        engine.backward(F.cross_entropy(engine(inputs), targets))
    else:
        engine.forward_backward((inputs, targets))


def check_goes_on(plan: str, loop: Callable[..., None]) -> None:
    """Each step fails first, at another place, with gradients of a batch that was right before."""
    with parallelized(plan) as engine:
        for step, place in enumerate(("forward", "backward", "loss")):
            add_gradients(engine, loop)
            with failing(engine, place):
                loop(engine, step, *([fail] if place == "loss" else []))
            engine.zero_grad()
            loop(engine, step)
        torch.testing.assert_close(
            engine.full_state_dict(), plain(), rtol=0, atol=1e-9, msg=lambda t: f"{plan}: {t}"
        )


PLANS = [
    "data=1",
    "zero=3 offload=optimizer,parameters",
    "offload=activations",
    "recompute=full offload=parameters,activations",
    "offload=optimizer",
]
OVER_RANKS = [
    "data=2",
    "data=2 zero=1",
    "data=2 zero=2",
    "data=2 zero=3",
    "data=2 zero=3 offload=parameters,activations",
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("loop", [by_batches, by_calls])
def test_a_pass_that_raises_leaves_nothing_behind(loop: Callable[..., None]) -> None:
    for plan in PLANS:
        check_goes_on(plan, loop)


def check_all(loop: Callable[..., None]) -> None:
    for plan in OVER_RANKS:
        check_goes_on(plan, loop)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("loop", [by_batches, by_calls])
def test_nor_on_other_ranks(warm_ranks: Warm, loop: Callable[..., None]) -> None:
    warm_ranks(2).run(check_all, loop)


# By hand.


def change(engine: Engine, value: float) -> None:
    with torch.no_grad():
        engine.module.layers[0].bias.fill_(value)  # type: ignore[union-attr,index,operator]


def changed(plan: str, loop: Callable[..., None]) -> dict[str, Tensor]:
    """The same change on all ranks is taken over; one that ranks make differently is refused by all."""
    with parallelized(plan) as engine:
        loop(engine, 0)
        change(engine, 1.0)
        loop(engine, 1)
        if engine.replicas > 1:
            add_gradients(engine, loop)
            change(engine, float(engine.replica))
            with pytest.raises(UserError, match="changed by hand"):
                engine.update()
        change(engine, 2.0)
        loop(engine, 2)
        return engine.full_state_dict()


@pytest.mark.parametrize("loop", [by_batches, by_calls])
def test_changes_by_hand_between_calls_must_be_those_of_all_ranks(
    warm_ranks: Warm, loop: Callable[..., None]
) -> None:
    alone = changed("data=1", loop)
    for plan in ("data=2", "data=2 zero=1"):
        for weights in warm_ranks(2).run(changed, plan, loop):
            torch.testing.assert_close(weights, alone, rtol=0, atol=1e-9)


def check_worker() -> None:
    with parallelized("data=2 sync=async staleness=0") as engine:
        by_one = engine.local(batch(0))
        engine.forward_backward(by_one)
        with pytest.raises(UserError, match=r"one batch with each update.*called twice"):
            engine.forward_backward(by_one)
        engine.update()
        engine.step(by_one)


def test_a_worker_has_one_batch_for_each_update() -> None:
    launch(check_worker, 2)
