"""Experts over ranks, alone and with every other axis, are equal to one device."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from echelon.nn.experts import Experts, Gate, MixtureOfExperts, Routing, SoftmaxGate
from echelon.verify import assert_equal
from tests.nn.experts.models import EXPERTS, WIDTH, make_model
from tests.parallel.expert.models import TENSOR_TABLE, experts_case, plain_gate, tokens, transformers_case
from tests.update.optim.sum_cases import make_optimizer as make_sum_optimizer
from tests.update.optim.whole_cases import make_optimizer as make_whole_optimizer

pytestmark = pytest.mark.usefixtures("warm_contract")

FAST = [
    "data=2 expert=2",
    "data=4 expert=2 zero=3",
]
SLOW = [
    "data=4 expert=4",
    "data=4 expert=2",
    "data=4 expert=2 zero=1",
    "data=4 expert=2 zero=2 microbatches=2",
    "data=4 expert=4 zero=3",
    "data=4 expert=2 zero=3 shard=2",
    "data=4 expert=2 zero=1 shard=2 microbatches=2",
    "data=4 expert=2 context=2 zero=2 shard=4",
    "data=2 expert=2 context=2 zero=3 shard=2",
    "data=2 expert=2 microbatches=3",
    "data=2 expert=2 pipeline=2 microbatches=2",
    "data=2 expert=2 pipeline=2 schedule=gpipe microbatches=3",
    "data=2 expert=2 pipeline=2 schedule=interleaved chunks=2 microbatches=4",
    "data=2 expert=2 pipeline=2 schedule=zero-bubble microbatches=4",
    "data=2 expert=2 recompute=full",
    "data=2 expert=2 recompute=selective",
    "data=2 expert=2 pipeline=2 zero=3 recompute=full microbatches=2",
    "data=2 expert=2 context=2",
    "data=2 expert=2 context=2 zero=3",
    "data=2 expert=2 context=2 attention=all-to-all",
    "data=2 expert=2 offload=optimizer,parameters",
    "data=4 expert=2 zero=3 offload=optimizer",
    "data=4 expert=2 zero=3 offload=parameters,activations",
    "data=2 expert=2 offload=activations",
    "data=4 expert=2 sync=parameter-server",
    "data=2 expert=2 compress=gist",
    "data=2 expert=2 tensor=2",
    "data=2 expert=2 tensor=2 sequence=true",
    "data=2 expert=2 tensor=2 pipeline=2 microbatches=2 zero=1",
    "data=4 expert=2 zero=3 update=backward",
    "data=4 expert=2 update=backward",
    "data=2 expert=2 update=last-backward microbatches=2",
    "data=2 expert=2 pipeline=2 schedule=pipedream microbatches=2",
    "data=2 expert=2 pipeline=2 schedule=pipedream-vertical microbatches=2",
    "data=2 expert=2 pipeline=2 schedule=pipedream-2bw microbatches=2",
]


@pytest.mark.slow_cases("data=4 expert=2 zero=3")
@pytest.mark.parametrize("plan", [*FAST, *(pytest.param(plan, marks=pytest.mark.slow) for plan in SLOW)])
def test_experts_over_ranks_are_equal_to_one_device(plan: str) -> None:
    case = experts_case(steps=5)
    if "update=" in plan or "pipedream" in plan:
        case = replace(case, clip=None)
    if "tensor=" in plan:
        case = replace(case, options={"tensor_table": TENSOR_TABLE})
    assert_equal(case, plan)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [7, 2])
@pytest.mark.parametrize("plan", ["data=2 expert=2 microbatches=2", "data=2 expert=2 pipeline=2 zero=3"])
def test_ranks_with_other_numbers_of_samples_take_part_in_every_microbatch(plan: str, samples: int) -> None:
    assert_equal(experts_case(samples=samples, steps=3), plan)


_BUDGET = 120_000  # less than what the rank with most samples keeps, more than what the other one does


def growing_batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank has more samples than the other, then both have as many."""
    return tokens(step, samples=5 + step // 2)


@pytest.mark.parametrize(
    "plan",
    [
        "data=2 expert=2",
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in [
                "data=2 expert=2 microbatches=2",
                "data=4 expert=2 zero=3",
                "data=2 expert=2 pipeline=2 schedule=interleaved chunks=2 microbatches=2",
            ]
        ),
    ],
)
def test_ranks_that_keep_different_amounts_recompute_the_same_layers(plan: str) -> None:
    """Each rank chose for itself: one sent rows again that no other rank waited for."""
    case = replace(experts_case(steps=4), make_batch=growing_batches)
    assert_equal(case, f"{plan} recompute=budget:{_BUDGET}")


class OneSided(SoftmaxGate):
    """Every token goes to the first experts; with `drops`, each second slot to none."""

    drops = False

    def forward(self, x: torch.Tensor) -> Routing:
        indices, weights = super().forward(x)
        indices = torch.arange(self.top_k, device=x.device).expand_as(indices)
        if not self.drops:
            return Routing(indices, weights)
        dropped = torch.zeros_like(indices, dtype=torch.bool)
        dropped[::2, 1] = True
        return Routing(indices.masked_fill(dropped, self.num_experts), weights.masked_fill(dropped, 0.0))


class Dropping(OneSided):
    drops = True


def one_sided_gate(kind: type[OneSided]) -> Gate:
    return kind(WIDTH, EXPERTS, 2)


class LoopedExperts(nn.Module):
    """As transformers has them: a loop over the experts that have a token."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        output = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            tokens, slots = torch.where(top_k_index == expert)
            computed = torch.tanh(hidden_states[tokens] @ self.up_proj[expert])
            output = output.index_add(0, tokens, computed * top_k_weights[tokens, slots, None])
        return output


def looped_model() -> nn.Module:
    model = make_model(partial(one_sided_gate, OneSided))
    for block in model.blocks:
        block.mlp.experts = LoopedExperts()
    return model


ONE_SIDED = {
    "grouped": partial(make_model, partial(one_sided_gate, OneSided)),
    "loop": looped_model,
    "dropping": partial(make_model, partial(one_sided_gate, Dropping)),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ONE_SIDED)
def test_experts_without_a_token_decay_as_on_one_device(kind: str) -> None:
    """Those of the second rank never see one: without a gradient of zero, an optimizer left them out. Dropped
    slots are not sent."""
    assert_equal(experts_case(ONE_SIDED[kind], steps=3), "data=2 expert=2")


def frozen_experts() -> nn.Module:
    model = make_model(plain_gate)
    first = model.blocks[0].mlp
    for parameter in first.experts.parameters():
        parameter.requires_grad_(False)
    return model


def shared_experts(activation: str = "gelu") -> nn.Module:
    model = make_model(plain_gate)
    for block in model.blocks:
        shared = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))
        block.mlp = MixtureOfExperts(plain_gate(), Experts(EXPERTS, WIDTH, 12, activation), shared)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("make_model_of", [frozen_experts, shared_experts])
@pytest.mark.parametrize("plan", ["data=2 expert=2", "data=4 expert=2 zero=3", "data=2 expert=2 pipeline=2"])
def test_frozen_and_shared_experts(make_model_of: object, plan: str) -> None:
    assert_equal(experts_case(make_model_of, steps=3), plan)


HUGGINGFACE = [
    ("mixtral", "data=4 expert=4"),
    ("mixtral", "data=2 expert=2 pipeline=2 microbatches=2"),
    ("mixtral", "data=2 expert=2 pipeline=2 schedule=zero-bubble microbatches=2"),
    ("mixtral", "data=2 expert=2 zero=3 recompute=full"),
    ("mixtral", "data=2 expert=2 tensor=2"),
    ("mixtral", "data=2 expert=2 tensor=2 sequence=true"),
    ("mixtral", "data=2 expert=2 context=2"),
    ("qwen2_moe", "data=2 expert=2"),
    ("qwen3_moe", "data=2 expert=2"),
    ("deepseek_v2", "data=2 expert=2"),
    ("deepseek_v3", "data=2 expert=2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "plan"), HUGGINGFACE)
def test_experts_of_transformers(kind: str, plan: str) -> None:
    assert_equal(transformers_case(kind, steps=5), plan)


def test_experts_of_mixtral() -> None:
    assert_equal(transformers_case("mixtral", steps=2), "data=2 expert=2")


OPTIMIZERS = {
    "adafactor": partial(make_sum_optimizer, "adafactor"),
    "sm3": partial(make_sum_optimizer, "sm3"),
    "lamb": partial(make_whole_optimizer, "lamb"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "plan",
    [
        "data=4 expert=2",
        "data=4 expert=2 zero=1",
        "data=4 expert=2 zero=3 shard=2",
        "data=2 expert=2 tensor=2",
    ],
)
def test_optimizers_see_whole_experts(name: str, plan: str) -> None:
    """A statistic of a parameter is that of all of its experts."""
    case = experts_case(steps=3)
    if "tensor=" in plan:
        case = replace(case, options={"tensor_table": TENSOR_TABLE})
    assert_equal(replace(case, make_optimizer=OPTIMIZERS[name]), plan)
