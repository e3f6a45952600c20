"""Who speaks on standard output, and how."""

import json
import math

import pytest

from echelon.cli.options import console, is_first_rank, print_json


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
