import subprocess
import sys

import pytest
import torch

from echelon.errors import UserError
from echelon.launching import RankFailed, launch
from tests.launching import tasks


def test_every_rank_answers_with_what_it_was_given() -> None:
    results = launch(tasks.sum_of_ranks, 3, torch.tensor([1.0, 2.0]))
    assert [result.tolist() for result in results] == [[6.0, 9.0]] * 3


def test_one_rank_is_enough() -> None:
    assert launch(tasks.rank, 1) == [0]


def test_a_failure_is_raised_with_the_traceback_of_its_rank() -> None:
    with pytest.raises(RankFailed, match=r"(?s)^rank 1 raised ValueError.*_raise_value_error"):
        launch(tasks.fail, 2, "raise", 1)


def test_a_function_that_cannot_be_sent_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.launching.launcher.Ranks", None)
    with pytest.raises(UserError, match="<lambda> cannot be sent"):
        launch(lambda: 0, 2)


def test_importing_the_launcher_imports_no_torch() -> None:
    code = "import sys, echelon.launching; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
