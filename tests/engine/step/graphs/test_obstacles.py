"""What is not recorded is said by name."""

import random

import pytest
import torch
from torch import nn

from echelon.engine.step.graphs.obstacles import DrawWatch, hook_obstacle, is_seen, plan_obstacle
from echelon.engine.step.side_effects import FirstForward
from echelon.parallel.observer import Observers, StepObserver
from echelon.plan import FIELDS, Plan
from tests.engine.step.graphs.fake_recorder import engine_of, network

REFUSED = [
    ("data=2", "messages between ranks"),
    ("tensor=2", "messages between ranks"),
    ("pipeline=2 microbatches=2", "messages between ranks"),
    ("context=2", "messages between ranks"),
    ("recompute=full", "layers run again"),
    ("offload=activations", "copies to and from the host"),
    ("update=backward", "updates run between"),
    ("precision=fp8", "products in 8 bits"),
    ("schedule=pipedream microbatches=2", "weights of other updates"),
]


@pytest.mark.parametrize(("plan", "reason"), REFUSED)
def test_plans_whose_passes_are_not_recorded(plan: str, reason: str) -> None:
    found = plan_obstacle(Plan.parse(plan))
    assert found is not None
    assert reason in found


@pytest.mark.parametrize("plan", ["data=1", "microbatches=4 precision=bf16 compile=true", "zero=2"])
def test_plans_whose_passes_are(plan: str) -> None:
    assert plan_obstacle(Plan.parse(plan)) is None


def test_each_rule_of_graphs_is_an_obstacle() -> None:
    assert len(FIELDS["graphs"].rules) == len({reason for _, reason in REFUSED})


class Loss(StepObserver):
    def after_loss(self, loss: object) -> None: ...


class Step(StepObserver):
    def after_step(self) -> None: ...


def test_only_what_sees_single_passes_keeps_them_from_being_replayed() -> None:
    engine = engine_of(network(), "data=1")
    observers = engine._setup.observers
    assert observers.has_kind(FirstForward)
    assert not is_seen(observers)
    observers.add(Step())
    assert not is_seen(observers)
    observers.add(Loss())
    assert is_seen(observers)
    observers.remove_kind(Loss)
    with torch.overrides.BaseTorchFunctionMode():
        assert is_seen(observers)
    assert not is_seen(observers)
    assert not is_seen(Observers())


def test_hooks_of_others_see_passes() -> None:
    module = nn.Linear(2, 2)
    module.register_forward_hook(hook_obstacle)  # a function of echelon
    assert hook_obstacle([module]) is None
    handle = module.weight.register_post_accumulate_grad_hook(lambda _: None)
    assert hook_obstacle([module]) == "a hook of a Linear would run in no replay"
    handle.remove()
    assert hook_obstacle([module]) is None


def test_draws_are_named() -> None:
    device = torch.device("cpu")
    assert DrawWatch(device, []).obstacle() is None
    for draw in (random.random, lambda: torch.rand(1)):
        watch = DrawWatch(device, [])
        draw()
        assert "draw from the generator of" in str(watch.obstacle())
