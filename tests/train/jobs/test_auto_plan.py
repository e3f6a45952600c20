"""Jobs whose plan is `auto`."""

from dataclasses import replace

import pytest

from echelon.errors import UserError
from echelon.plan import Plan
from echelon.train.jobs.auto_plan import with_chosen_plan
from echelon.train.jobs.job import Job, ModelJob
from echelon.train.jobs.job_rules import job_errors


def test_a_job_that_says_its_plan_stays() -> None:
    assert with_chosen_plan(Job()) == (Job(), "")


def test_a_job_gets_a_plan_for_so_many_ranks() -> None:
    job, why = with_chosen_plan(Job(plan="auto ranks=2 memory=100MiB", batch=8))
    assert Plan.parse(job.plan).ranks == 2
    assert job_errors(job) == []
    assert f'plan="{job.plan}"' in why
    assert replace(job, plan="") == Job(plan="", batch=8)


def test_other_errors_come_first_and_all_of_them() -> None:
    with pytest.raises(UserError) as caught:
        with_chosen_plan(Job(plan="auto", steps=0, model=ModelJob(preset="gpt-tinny")))
    assert len(caught.value.errors) == 2
    with pytest.raises(UserError, match="must be one of"):
        with_chosen_plan(Job(plan="auto precision=9"))
    with pytest.raises(UserError, match="for images say a plan"):
        with_chosen_plan(Job(plan="auto", task="images", batch=4))
