"""recompute=selective trains to the weights of one device, whatever else a plan has."""

import dataclasses

import pytest
from torch import nn

from echelon.models import ModelConfig, build
from echelon.verify import Case, assert_equal
from tests.cases import adamw
from tests.contract_models import CASES, SEQUENCE, VOCAB, token_loss, tokens

_GPT = ModelConfig("gpt", layers=2, width=16, heads=2, vocab=VOCAB, sequence=SEQUENCE, tied=True)


pytestmark = pytest.mark.usefixtures("warm_contract")


def dropping_gpt() -> nn.Module:
    return build(dataclasses.replace(_GPT, dropout=0.2))


DROPPING = Case(dropping_gpt, tokens, token_loss, adamw)


def test_weights_that_are_freed_before_they_are_used_again() -> None:
    """Norms come last in the layers of torch's encoder: the next layer needs what they return."""
    assert_equal(CASES["encoder"], "data=2 zero=3 recompute=selective")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "llama", "encoder", "resnet", "twice"])
@pytest.mark.parametrize(
    "plan",
    [
        "data=2 zero=0",
        "data=2 zero=1",
        "data=2 zero=2 microbatches=2",
        "data=2 zero=3 microbatches=2",
        "data=2 sync=parameter-server",
    ],
)
def test_every_way_to_share_weights(model: str, plan: str) -> None:
    assert_equal(CASES[model], f"{plan} recompute=selective")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize(
    "plan",
    [
        *(
            f"pipeline=2 microbatches=4 schedule={schedule}"
            for schedule in ("1f1b", "gpipe", "interleaved chunks=2", "zero-bubble")
        ),
        "tensor=2",
        "tensor=2 sequence=true",
        "context=2",
        "context=2 attention=all-to-all",
        "data=2 pipeline=2 zero=3 microbatches=2",
    ],
)
def test_every_axis(model: str, plan: str) -> None:
    assert_equal(CASES[model], f"{plan} recompute=selective")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-vertical", "pipedream-2bw"])
def test_older_weights(schedule: str) -> None:
    """What runs again must find the version of the forward pass."""
    case = dataclasses.replace(CASES["llama"], clip=None)  # no weights are tied
    assert_equal(case, f"pipeline=2 microbatches=4 schedule={schedule} recompute=selective")


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "data=2 zero=3",
        "tensor=2 sequence=true",
        "context=2",
        "pipeline=2 schedule=zero-bubble microbatches=3",
    ],
)
def test_dropout(plan: str) -> None:
    assert_equal(DROPPING, f"{plan} recompute=selective")
