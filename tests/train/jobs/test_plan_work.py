import time

from echelon.plan import Plan
from echelon.train.jobs.job import Job
from echelon.train.jobs.job_rules import job_errors, work_error


def test_a_number_beyond_reason_is_refused_at_once() -> None:
    # pipeline=99999999 made a tuple of that length, and a schedule of as many microbatches, for minutes.
    began = time.process_time()
    assert "below 1,000,000" in job_errors(Job(plan="pipeline=99999999"))[0]
    assert "1,999,998 forwards" in job_errors(Job(plan="pipeline=2 microbatches=999999"))[0]
    assert time.process_time() - began < 10


def test_only_a_pipeline_has_a_program_that_grows_with_its_microbatches() -> None:
    assert work_error(Plan(microbatches=999_999, chunks=1, data=999_999)) is None
    assert work_error(Plan(pipeline=2, microbatches=5 * 10**5)) is None
    assert work_error(Plan.parse("pipeline=auto")) is None
