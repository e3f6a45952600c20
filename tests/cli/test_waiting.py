import io
import itertools

import pytest
from rich.console import Console

from echelon.cli import partition as waiting
from echelon.cli.partition import Waiting


def told(monkeypatch: pytest.MonkeyPatch, done: list[float], seconds_between: float) -> str:
    clock = itertools.count(0.0, seconds_between)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=False, width=200)
    with Waiting("splitting", "levels take less", console) as wait:
        for part in done:
            wait.progress(part)
    return stream.getvalue()


def test_a_long_computation_says_once_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [0.0, 0.01, 0.02, 0.5]
    assert told(monkeypatch, parts, 1.0) == "splitting takes about 200.00 s; levels take less\n"


def test_a_short_one_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, [0.1, 0.5, 1.0], 0.1) == ""
    assert told(monkeypatch, [0.5, 0.9, 1.0], 1.0) == ""
