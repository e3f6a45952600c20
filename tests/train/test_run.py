"""A run that an error ends: what is said of it."""

from pathlib import Path

import pytest

from echelon.train.jobs.job import Job
from echelon.train.run import open_run
from tests.train.test_display import stepped


@pytest.mark.parametrize(
    ("steps", "done"), [(0, "no step was made"), (1, "step 1 was the last"), (2, "step 2 was the last")]
)
def test_an_interrupted_run_says_how_far_it_came(tmp_path: Path, steps: int, done: str) -> None:
    opened = open_run(Job(out=str(tmp_path)), lambda _: None)
    with pytest.raises(KeyboardInterrupt) as caught, opened as run:  # noqa: PT012
        for step in range(1, steps + 1):
            run.take(stepped(step))
        raise KeyboardInterrupt
    assert caught.value.__notes__ == [f"{done}; the run is in {run.folder.path}"]
