"""What a rank would refuse is refused before one starts, in the same words."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from echelon.models import preset
from echelon.plan import Plan
from echelon.train.jobs.job_rules import division_errors

TINY = preset("gpt-tiny")  # 4 blocks and 4 heads


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("tensor=3", "config.heads=4 is not divisible by 3 ranks"),
        ("context=3 attention=all-to-all", "4 heads are not divisible by 3 ranks"),
        ("pipeline=7 microbatches=7", "6 layers of GPT cannot make 7 stages"),
        ("pipeline=2 schedule=pipedream", "untie the weights, or use schedule=1f1b"),
        ("pipeline=2 schedule=nowhere.txt", "schedule 'nowhere.txt' cannot be read"),
        ("schedule=nowhere.txt", "schedule 'nowhere.txt' cannot be read"),
        ("pipeline=auto tensor=3", "config.heads=4 is not divisible by 3 ranks"),
    ],
)
def test_a_plan_that_cannot_divide_the_model(plan: str, says: str) -> None:
    assert any(says in error for error in division_errors(TINY, Plan.parse(plan)))


def test_errors_of_several_axes_come_together() -> None:
    errors = division_errors(TINY, Plan.parse("tensor=3 pipeline=7 microbatches=7"))
    assert any("heads" in error for error in errors)
    assert any("7 stages" in error for error in errors)


def test_a_schedule_file_of_another_plan(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("F0 B0\n", encoding="utf-8")
    plan = Plan.parse(f"pipeline=2 microbatches=2 schedule={file}")
    assert division_errors(TINY, plan)


@pytest.mark.parametrize(
    "plan",
    [
        "data=8",
        "tensor=2 pipeline=2 microbatches=2",
        "context=2",
        "tensor=2 sequence=true",
        "pipeline=3-1 microbatches=4",
        "pipeline=2 schedule=interleaved chunks=2 microbatches=2",
        "pipeline=auto data=2",
    ],
)
def test_a_plan_that_can(plan: str) -> None:
    assert division_errors(TINY, Plan.parse(plan)) == []


@pytest.mark.parametrize("plan", ["tensor=2", "tensor=2 sequence=true", "pipeline=2 tensor=2 microbatches=2"])
def test_dropout_is_drawn_by_the_seed_of_the_job(plan: str) -> None:
    assert division_errors(replace(TINY, dropout=0.1), Plan.parse(plan)) == []


def test_the_largest_model_takes_no_memory_and_no_random_numbers() -> None:
    state = torch.random.get_rng_state()
    assert division_errors(preset("llama3-405b"), Plan.parse("pipeline=129 microbatches=129"))
    assert torch.equal(torch.random.get_rng_state(), state)
