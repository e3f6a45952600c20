"""Arguments of a Trainer that an engine takes over, or that a plan says."""

from types import SimpleNamespace
from typing import Any

import pytest

from echelon.errors import UserError
from echelon.plan import Plan
from echelon.train.integrations.hf_arguments import taken_over


def arguments(**given: Any) -> Any:
    return SimpleNamespace(**{"gradient_accumulation_steps": 1, "n_gpu": 0, "_n_gpu": 0} | given)


def test_accumulation_becomes_microbatches() -> None:
    given = arguments(gradient_accumulation_steps=3, n_gpu=2)
    own, plan = taken_over(given, Plan.parse("pipeline=2 microbatches=2"))
    assert plan == Plan.parse("pipeline=2 microbatches=6")
    assert (own.gradient_accumulation_steps, own._n_gpu) == (1, 1)
    assert given.gradient_accumulation_steps == 3, "the user's own are as they were"


def test_all_that_a_plan_says_is_refused_at_once_with_its_word() -> None:
    with pytest.raises(UserError) as raised:
        taken_over(arguments(bf16=True, fsdp="full_shard", gradient_checkpointing=True), Plan())
    assert str(raised.value).startswith("3 errors in the arguments of a Trainer with a plan:")
    assert "bf16=True): the engine does this; write precision=bf16 in the plan" in str(raised.value)
