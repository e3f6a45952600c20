"""Models with experts, heads of their own width, and norms of queries and keys, are equal to one device."""

from functools import partial

import pytest

from echelon.models import ExpertsConfig, ModelConfig, build, cross_entropy
from echelon.verify import Case, assert_equal
from tests.cases import adamw
from tests.nn.experts.cases import tokens
from tests.nn.experts.models import SEQUENCE, VOCAB

pytestmark = pytest.mark.usefixtures("warm_contract")

LLAMA = ModelConfig(
    "llama",
    3,
    16,
    4,
    vocab=VOCAB,
    sequence=SEQUENCE,
    kv_heads=2,
    ffn=24,
    head_width=6,
    qk_norm=True,
    experts=ExpertsConfig(4, 2, 8, shared=12, shared_gate=True, first_dense=1, balance=0.1, z_loss=0.01),
)
GPT = ModelConfig(
    "gpt",
    2,
    16,
    4,
    vocab=VOCAB,
    sequence=SEQUENCE,
    tied=True,
    experts=ExpertsConfig(4, 1, 8, gate="switch", shared=12, balance=0.1),
)
PLANS = [
    "data=2 expert=2 zero=3",
    "tensor=2 sequence=true",
    "context=2",
    "data=2 expert=2 tensor=2",
    "data=2 expert=2 pipeline=2 microbatches=2",
    "pipeline=2 schedule=zero-bubble microbatches=4 recompute=full",
]


def case(config: ModelConfig) -> Case:
    return Case(partial(build, config), tokens, cross_entropy, adamw, steps=5)


@pytest.mark.parametrize(
    "plan", ["tensor=2", *(pytest.param(each, marks=pytest.mark.slow) for each in PLANS)]
)
def test_a_llama_with_experts(plan: str) -> None:
    assert_equal(case(LLAMA), plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tensor=2", *PLANS])
def test_a_gpt_with_experts(plan: str) -> None:
    assert_equal(case(GPT), plan)
