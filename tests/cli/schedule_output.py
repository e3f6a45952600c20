"""Runs `echelon schedule` and returns what it prints."""

import pytest

from echelon.cli.main import run


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(["schedule", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err
