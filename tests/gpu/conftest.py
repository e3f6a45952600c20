"""Records a run of the GPU tests, which CI cannot do: pytest -m gpu tests/gpu --record benchmarks/results"""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
from benchmarks.result import make_result


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="folder to write gpu-tests.json into")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    folder: Path | None = config.getoption("--record")
    if folder is None:
        return
    record = folder / "gpu-tests.json"
    outcomes = {
        report.nodeid: kind
        for kind in ("passed", "skipped", "failed", "error")
        for report in terminalreporter.stats.get(kind, [])
    }
    result = make_result("gpu-tests", "pytest -m gpu tests/gpu --record benchmarks/results", {}, ())
    outcomes = _outcomes_at(result.commit, record) | outcomes
    result = dataclasses.replace(result, settings=dict(Counter(outcomes.values())))
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(result) | {"outcomes": outcomes}, indent=2)
    record.write_text(text + "\n", encoding="utf-8")


def _outcomes_at(commit: str | None, record: Path) -> dict[str, str]:
    """What an earlier run at the same commit has recorded: the tests need not all run at once."""
    if not record.exists():
        return {}
    earlier = json.loads(record.read_text(encoding="utf-8"))
    outcomes: dict[str, str] = earlier.get("outcomes", {})
    return outcomes if commit is not None and earlier["commit"] == commit else {}
