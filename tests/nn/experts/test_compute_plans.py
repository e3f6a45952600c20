"""Experts under plans: backward passes in two, second runs, weights that come and go.

The gates here have no balancing loss.
"""

from functools import partial

import pytest
from torch import nn

from echelon.launching import Ranks
from echelon.models import cross_entropy
from echelon.nn.experts import Gate, SoftmaxGate
from echelon.verify import Case, verify
from tests.cases import adamw
from tests.nn.experts.models import EXPERTS, WIDTH, make_model
from tests.parallel.tensor.models import tokens


def unbalanced() -> Gate:
    return SoftmaxGate(WIDTH, EXPERTS, 2)


def model() -> nn.Module:
    return make_model(unbalanced)


PLANS = [
    "data=2 zero=3",
    "data=2 zero=3 recompute=full",
    "data=2 recompute=selective",
    "pipeline=2 microbatches=4 schedule=zero-bubble",
    "pipeline=2 microbatches=4 offload=activations",
]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_equal_to_one_device(plan: str) -> None:
    case = Case(model, partial(tokens, samples=7), cross_entropy, adamw, steps=4, clip=1.0)
    with Ranks(2) as ranks:
        verdict = verify(case, plan, ranks=ranks)
    assert verdict.equal, verdict.worst
