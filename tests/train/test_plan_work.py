import time

import pytest

from echelon.plan import Plan
from echelon.train.job import Job
from echelon.train.job_rules import job_errors
from echelon.train.plan_text import text_errors, work_error


@pytest.mark.parametrize(
    "plan", ["data=2", "pipeline=3-1 microbatches=4", "recompute=budget:20000000000", ""]
)
def test_a_plan_of_usual_numbers(plan: str) -> None:
    assert text_errors(plan) == []


def test_digits_of_other_scripts_and_numbers_beyond_reason() -> None:
    assert text_errors("data=２ pipeline=1000000-1 microbatches=000004 tensor=999999 chunks=٣") == [
        "data=２: numbers must be written with the digits 0 to 9",
        "pipeline=1000000-1: must be below 1,000,000",
        "chunks=٣: numbers must be written with the digits 0 to 9",
    ]


def test_a_number_beyond_reason_is_refused_at_once() -> None:
    # pipeline=99999999 made a tuple of that length, and a schedule of as many microbatches, for minutes.
    began = time.monotonic()
    assert "below 1,000,000" in job_errors(Job(plan="pipeline=99999999"))[0]
    assert "1,999,998 forwards" in job_errors(Job(plan="pipeline=2 microbatches=999999"))[0]
    assert time.monotonic() - began < 10


def test_only_a_pipeline_has_a_program_that_grows_with_its_microbatches() -> None:
    assert work_error(Plan(microbatches=10**7)) is None
    assert work_error(Plan(pipeline=2, microbatches=5 * 10**5)) is None
    assert work_error(Plan.parse("pipeline=auto")) is None
