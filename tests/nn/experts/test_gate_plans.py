"""Gates with noise, capacity and losses, in many plans: equal to one device."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from echelon.models import cross_entropy
from echelon.nn.experts import (
    ExpertChoiceGate,
    Gate,
    GShardGate,
    HierarchicalGate,
    NoisyTopKGate,
    SigmoidGate,
    SoftmaxGate,
    SwitchGate,
)
from echelon.verify import Case, assert_equal
from tests.cases import adamw
from tests.nn.experts.models import EXPERTS, VOCAB, WIDTH, make_model

pytestmark = pytest.mark.usefixtures("warm_contract")

GATES: dict[str, Callable[[], Gate]] = {
    "softmax": lambda: SoftmaxGate(WIDTH, EXPERTS, 2, balance=0.1, z_loss=0.1),
    "noisy": lambda: NoisyTopKGate(WIDTH, EXPERTS, 2),
    "noisy, capacity": lambda: NoisyTopKGate(WIDTH, EXPERTS, 2, z_loss=0.1, capacity=1.0),
    "switch": lambda: SwitchGate(WIDTH, EXPERTS, balance=0.1, jitter=0.1, capacity=1.0),
    "gshard": lambda: GShardGate(WIDTH, EXPERTS, balance=0.1),
    "gshard, capacity": lambda: GShardGate(WIDTH, EXPERTS, balance=0.1, capacity=1.0),
    "sigmoid": lambda: SigmoidGate(WIDTH, EXPERTS, 2, groups=2, top_groups=1, bias_rate=0.01),
    "hierarchical": lambda: HierarchicalGate(WIDTH, 4, 4),
    "hierarchical, capacity": lambda: HierarchicalGate(WIDTH, 4, 4, capacity=1.0),
    "expert choice": lambda: ExpertChoiceGate(WIDTH, EXPERTS, z_loss=0.1),
}
PLANS = [
    "data=2",
    "data=4 expert=2 zero=1",
    "data=4 expert=4",
    "data=2 expert=2 zero=3 microbatches=2",
    "data=2 zero=2 recompute=full",
    "pipeline=2 microbatches=2",
    "pipeline=2 schedule=interleaved chunks=2 microbatches=2",
    "pipeline=2 schedule=zero-bubble microbatches=3",
    "tensor=2",
    "tensor=2 sequence=true recompute=full",
    "context=2",
    "data=2 expert=2 context=2 recompute=full",
    "context=2 tensor=2 sequence=true",
]


def tokens(step: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randint(VOCAB, (2, 7, length), generator=generator)
    return inputs, targets


def make_case(name: str, length: int, steps: int = 4) -> Case:
    make = partial(named_model, name)
    return Case(make, partial(tokens, length=length), cross_entropy, adamw, steps=steps)


def named_model(name: str) -> torch.nn.Module:
    return make_model(GATES[name])


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases("sigmoid-8-pipeline=2 microbatches=2")
@pytest.mark.parametrize(
    ("name", "length", "plan"),
    [
        ("noisy", 8, "data=2 expert=2 microbatches=2 recompute=full"),
        ("gshard, capacity", 7, "tensor=2 sequence=true"),
        ("hierarchical, capacity", 7, "context=2"),
        ("sigmoid", 8, "pipeline=2 microbatches=2"),
    ],
)
def test_a_few(name: str, length: int, plan: str) -> None:
    assert_equal(make_case(name, length), plan)


@pytest.mark.slow
@pytest.mark.parametrize("length", [8, 7])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", GATES)
def test_every_gate_in_every_plan(name: str, plan: str, length: int) -> None:
    if length == 7 and not ("context" in plan or "sequence" in plan):
        pytest.skip("nothing is padded")
    assert_equal(make_case(name, length), plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["compile=true", "data=2 expert=2 compile=true"])
@pytest.mark.parametrize("name", ["noisy", "gshard, capacity"])
def test_compiled(name: str, plan: str) -> None:
    """Gates and experts run between what is compiled."""
    assert_equal(make_case(name, 8, steps=3), plan)
