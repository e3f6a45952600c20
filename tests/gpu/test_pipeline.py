"""Pipelines on a GPU: ranks that share one, over Gloo. Run by hand: pytest -m gpu tests/gpu"""

import dataclasses

import pytest
import torch

from echelon.verify import assert_equal
from tests.contract_models import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=2 schedule=naive microbatches=2",
        "pipeline=2 schedule=gpipe microbatches=4",
        "pipeline=3 microbatches=4",
        "pipeline=2 schedule=interleaved chunks=2 microbatches=4",
        "pipeline=2 schedule=zero-bubble microbatches=4",
        "pipeline=3-1 microbatches=4",
        "data=2 pipeline=2 zero=1 microbatches=2",
        "data=2 pipeline=2 zero=2 microbatches=2",
        "data=2 pipeline=2 zero=3 microbatches=2",
    ],
)
def test_flushed_schedules_are_equal_to_one_device(plan: str) -> None:
    assert_equal(CASES["gpt"], plan)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-vertical", "pipedream-2bw"])
def test_endless_schedules_are_equal_to_their_formula(schedule: str) -> None:
    case = dataclasses.replace(CASES["llama"], clip=None)
    assert_equal(case, f"pipeline=2 schedule={schedule} microbatches=3")
