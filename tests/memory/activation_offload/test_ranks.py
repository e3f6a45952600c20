"""offload=activations over several ranks: equal to one device."""

import dataclasses

import pytest
from torch import nn

from echelon.models import ModelConfig, build
from echelon.verify import Case, assert_equal
from tests.cases import adamw
from tests.contract_models import SEQUENCE, VOCAB, token_loss, tokens

pytestmark = pytest.mark.usefixtures("warm_contract")


def gpt() -> nn.Module:
    return build(ModelConfig("gpt", 4, 16, 2, vocab=VOCAB, sequence=SEQUENCE, dropout=0.2))


CASE = Case(gpt, tokens, token_loss, adamw, steps=3, clip=None)

FAST = [
    "data=2 zero=3",
    "pipeline=2 microbatches=4",
    "pipeline=2 microbatches=4 schedule=zero-bubble",
    "tensor=2 recompute=full checkpoints=split",
]
_SCHEDULES = ["naive", "gpipe", "interleaved chunks=2", "zero-bubble"]
_SCHEDULES += ["pipedream", "pipedream-vertical", "pipedream-2bw"]
_RECOMPUTE = ["full", "sqrt", "selective", "budget:1000000"]
SLOW = [
    *(f"data=2 zero={level} microbatches=2" for level in range(4)),
    *(f"pipeline=2 microbatches=4 schedule={name}" for name in _SCHEDULES),
    *(f"pipeline=2 microbatches=4 recompute={name}" for name in _RECOMPUTE),
    *(f"data=2 zero=3 recompute={name}" for name in _RECOMPUTE),
    "pipeline=2 microbatches=4 schedule=zero-bubble recompute=full",
    "pipeline=2 microbatches=4 schedule=pipedream recompute=selective",
    "pipeline=2-1 microbatches=4",
    "tensor=2",
    "tensor=2 sequence=true recompute=selective",
    "tensor=2 recompute=full contiguous=true",
    "tensor=2 recompute=full checkpoints=split contiguous=true",
    "context=2 attention=ring",
    "context=2 attention=all-to-all recompute=full",
    "data=2 sync=parameter-server",
    "data=2 zero=3 update=backward",
    "pipeline=2 microbatches=4 zero=2 data=2 update=last-backward",
]


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases("data=2 zero=3")
@pytest.mark.parametrize("plan", [*FAST, *(pytest.param(plan, marks=pytest.mark.slow) for plan in SLOW)])
def test_plans_are_equal_to_one_device(plan: str) -> None:
    case = CASE if plan in FAST else dataclasses.replace(CASE, steps=10)
    assert_equal(case, f"{plan} offload=activations")
