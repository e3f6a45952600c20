"""Records a run of the GPU tests, which CI cannot do: pytest -m gpu tests/gpu --record benchmarks/results"""

import dataclasses
import json
from pathlib import Path

import pytest

from echelon.bench.result import make_result


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="folder to write gpu-tests.json into")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    folder: Path | None = config.getoption("--record")
    if folder is None:
        return
    stats = terminalreporter.stats
    counts = {outcome: len(stats.get(outcome, [])) for outcome in ("passed", "failed", "error", "skipped")}
    result = make_result("gpu-tests", "pytest -m gpu tests/gpu --record benchmarks/results", counts, ())
    passed = [report.nodeid for report in stats.get("passed", [])]
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(result) | {"passed": passed}, indent=2)
    (folder / "gpu-tests.json").write_text(text + "\n", encoding="utf-8")
