"""Commands in this process, and trainings in processes of their own."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from echelon.cli.main import run

SMALL = [f"--set={setting}" for setting in ("model.layers=1", "model.width=32", "model.heads=2")]


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def train_command(out: Path) -> list[str]:
    return [sys.executable, "-m", "echelon", "train", "--set", f"out={out}", "--set", "steps=5000", *SMALL]


@contextmanager
def training(out: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A training of its own process, which does not outlive its test."""
    with subprocess.Popen(
        [*train_command(out), *options],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # a group of its own, which a test can signal
    ) as process:
        try:
            wait_for(lambda: list(out.glob("*/metrics.jsonl")))
            yield process
        finally:
            process.kill()


def wait_for(condition: Callable[[], object], seconds: float = 300.0, period: float = 0.05) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it never came"
        time.sleep(period)
