"""`echelon partition`: a table and a plan for people, one object for programs, every error at once."""

import io
import itertools
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from echelon.cli.main import app, run
from echelon.cli.partition import progress_on_screen
from echelon.planner import Node, chain, write_profile


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    first = Node("[first]", 1.0, 2.0, 0.0, 0.0, 0.0)
    write_profile(chain([first, Node("last", 0.5, 0.5, 0.0, 4e9, 0.0)]), path)
    return str(path)


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(["partition", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_for_people(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    code, out, _ = output(capsys, profile, "--workers", "4", "--bandwidth", "8Mb/s")
    assert code == 0
    assert "pipeline=3-1" in out
    assert "[first]" in out
    assert "0-2" in out


def test_for_programs(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    code, out, err = output(capsys, profile, "--workers", "4", "--bandwidth", "1e6", "--json")
    assert (code, err) == (0, "")
    value = json.loads(out)
    assert value["pipeline_seconds"] == 1.0
    assert value["speedup_over_data_parallel"] == 1500.0
    assert [(s["layers"], s["replicas"], s["seconds"]) for s in value["stages"]] == [
        (["[first]"], 3, 1.0),
        (["last"], 1, 1.0),
    ]


def test_two_levels_say_which_workers(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    arguments = [profile, "--workers", "2x2", "--bandwidth", "1GB/s,1e6", "--cost-model", "pipedream"]
    code, out, _ = output(capsys, *arguments)
    assert code == 0
    assert "Workers are numbered" in out
    value = json.loads(output(capsys, *arguments, "--json")[1])
    assert sorted(number for stage in value["stages"] for number in stage["workers"]) == [0, 1, 2, 3]


def test_options_change_the_answer(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    def seconds(*options: str) -> float:
        printed = output(capsys, profile, "--workers", "2", "--bandwidth", "1e9", "--json", *options)
        return float(json.loads(printed[1])["pipeline_seconds"])

    assert seconds() == 2.0  # data parallelism: max(4 / 2, 2 · 1/2 · 4 / 2)
    assert seconds("--straight") == 3.0
    assert seconds("--memory", "17GB") == 2.0
    assert seconds("--cost-model", "pipedream", "--free-activations") == 3.0
    assert seconds("--microbatches", "8") == 2.0


def test_every_error_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    graph = tmp_path / "graph.txt"
    graph.write_text("nonsense\nmore nonsense\n", encoding="utf-8")
    arguments = [str(graph), "--workers", "4x", "--bandwidth", "fast", "--memory", "much"]
    code, out, err = output(capsys, *arguments, "--cost-model", "pipedrem", "--microbatches", "0")
    assert (code, out) == (2, "")
    assert "7 errors" in err
    for word in (
        "'4x'",
        "'fast'",
        "'much'",
        "did you mean 'pipedream'?",
        "--microbatches 0",
        "line 1",
        "line 2",
    ):
        assert word in err
    code, out, err = output(capsys, *arguments, "--json")
    assert (code, err) == (2, "")
    assert json.loads(out)["exit_code"] == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--bandwidth", "1e9,1e9"], "1 levels of workers and 2 bandwidths"),
        (["--bandwidth", "1e9", "--microbatches", "2"], "at least 4 microbatches"),
        (["--bandwidth", "1e9", "--microbatches", "8", "--cost-model", "pipedream"], "updates after each"),
        (
            ["--bandwidth", "1e9", "--memory", "1GB"],
            "over 4 workers needs 16000000000 bytes",
        ),
        (["--bandwidth", "1e9", "--straight"], "there are only 2 layers"),
        ([], "--bandwidth"),
    ],
)
def test_what_has_no_answer_is_exit_2(
    capsys: pytest.CaptureFixture[str], profile: str, options: list[str], words: str
) -> None:
    code, _, err = output(capsys, profile, "--workers", "4", *options)
    assert code == 2
    assert words in err


def test_a_missing_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = output(capsys, str(tmp_path / "nosuch"), "--workers", "2", "--bandwidth", "1")
    assert code == 2
    assert "nosuch" in err


def test_the_page_tells_every_option_and_every_key(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "partition.md").read_text(encoding="utf-8")
    command: Any = typer.main.get_command(app).commands["partition"]  # type: ignore[attr-defined]
    options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    assert set(re.findall(r"^\| `(--[a-z-]+)", page, re.MULTILINE)) == options - {"--json", "--help"}
    value = json.loads(output(capsys, profile, "--workers", "4", "--bandwidth", "1e6", "--json")[1])
    documented = set(re.findall(r"`(\w+)`", page))
    assert {*value, *value["stages"][0]} <= documented


def told(monkeypatch: pytest.MonkeyPatch, done: list[float], seconds_between: float) -> str:
    clock = itertools.count(0.0, seconds_between)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=False, width=200)
    with progress_on_screen("splitting", "levels take less", console) as progress:
        for part in done:
            progress(part)
    return stream.getvalue()


def test_a_long_computation_says_once_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [0.0, 0.01, 0.02, 0.5]
    assert told(monkeypatch, parts, 1.0) == "splitting takes about 200.00 s; levels take less\n"


def test_a_short_one_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, [0.1, 0.5, 1.0], 0.1) == ""
    assert told(monkeypatch, [0.5, 0.9, 1.0], 1.0) == ""
