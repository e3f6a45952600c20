"""Who speaks on standard output, and how."""

import json
import math

import pytest

from echelon.cli.options import NAMES, console, is_first_rank, print_json, read_count
from echelon.models import presets
from echelon.train.jobs.job_rules import OPTIMIZERS
from echelon.update.optim.learning_rate import NAMES as SCHEDULES


@pytest.fixture
def second_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")


def test_without_torchrun_this_process_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    assert is_first_rank()
    print_json({"loss": math.nan})
    assert json.loads(capsys.readouterr().out) == {"loss": None}
    assert console(as_json=True).quiet
    assert not console(as_json=False).quiet


def test_under_torchrun_rank_0_alone_speaks(
    second_rank: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_first_rank()
    assert console(as_json=False).quiet
    print_json({"loss": 1.0})
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    assert is_first_rank()


def test_numbers_of_options() -> None:
    errors: list[str] = []
    assert [read_count("--steps", text, errors) for text in (None, "7", " 12 ", "999999")] == [
        None,
        7,
        12,
        999999,
    ]
    assert errors == []
    wrong = ["0", "-1", "", "x", "1.5", "1e3", "１２", "²", "1000000", "9" * 5000]
    assert [read_count("--steps", text, errors) for text in wrong] == [None] * len(wrong)
    assert errors[0] == "--steps 0: must be an integer from 1 to 999999"
    assert len(errors) == len(wrong)


def test_the_help_names_what_may_be_named() -> None:
    assert all(
        f" {name}," in f"{NAMES}," or f" {name};" in NAMES for name in (*presets(), *OPTIMIZERS, *SCHEDULES)
    )
