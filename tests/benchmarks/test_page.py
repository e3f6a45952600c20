"""What the benchmark page shows of a result."""

import dataclasses
from pathlib import Path

import pytest
from benchmarks.targets import TARGETS, Target

from benchmarks import Result, Row, Spread, page, save, sources

ONE = Spread(1.0, 1.0, 1.0)
RESULT = Result(
    name="step",
    command="echelon bench step",
    commit="0123456789abcdef-dirty",
    date="2030-01-01T00:00:00+00:00",
    versions={"torch": "9", "python": "3.14"},
    hardware={"cores": 2, "cpu": "Some CPU", "gpus": ["Some GPU"]},
    settings={"not_installed": ["deepspeed"], "remarks": ["zero=1: they differ"]},
    rows=(
        Row("1 device", "torch loop", "torch loop", Spread(1.0, 2.0, 3.0), ONE, {"peak_bytes": 2048}),
        Row("1 device", "echelon", "torch loop", ONE, Spread(1.0, 1.5, 2.0)),
    ),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(TARGETS, "step", (Target(1.4, "a promise"), Target(1.6, "a promise")))
    save(RESULT, tmp_path)
    return tmp_path


def test_a_section_has_rows_targets_and_where_they_come_from(folder: Path) -> None:
    text = page.sections(folder)
    assert "\n### step\n\nA training step of a small GPT" in text
    assert "| case | contender | time | ratio to baseline | peak | target |\n" in text
    assert "| 1 device | torch loop | 2.00 s (1.00 s … 3.00 s) | baseline | 2.0 KiB |  |\n" in text
    targets = "ratio ≤ 1.4: **missed**; ratio ≤ 1.6: met"
    assert f"| 1 device | echelon | 1.00 s | 1.50 (1.00 … 2.00) |  | {targets} |\n" in text
    machine = "Some GPU, 2 cores of Some CPU, torch 9, python 3.14"
    assert f"*`python -m benchmarks step`: {machine}, commit `01234567` and changes, 2030-01-01.*\n" in text
    assert "\n`deepspeed` was not installed.\n\nzero=1: they differ\n\nTargets: a promise.\n" in text
    assert "**Stale**" in text


def test_the_overview_counts_targets_and_lists_what_is_not_measured(folder: Path) -> None:
    text = page.overview(folder)
    assert "| [step](#step) | Some GPU, 2 cores of Some CPU | 2030-01-01 | 1 of 2 | **stale** |\n" in text
    assert "| `pipeline` |  | not measured |  |  |\n" in text


def test_a_result_of_the_sources_of_now_is_not_stale(folder: Path) -> None:
    kept = sources.hashes("step", page)
    save(dataclasses.replace(RESULT, sources=kept), folder)
    assert "**Stale**" not in page.sections(folder)
    assert "| 1 of 2 | as measured |\n" in page.overview(folder)


def test_parts_of_a_bench_follow_it_and_other_records_do_not(folder: Path) -> None:
    save(RESULT, folder / "part").rename(folder / "step-large.json")
    other = dataclasses.replace(RESULT, name="nccl")
    save(other, folder).rename(folder / "step-nccl.json")
    heads = [line for line in page.sections(folder).splitlines() if line.startswith("### ")]
    assert heads == ["### step", "### step-large"]


def test_the_rows_of_a_bench_are_on_the_page_that_explains_it_too(folder: Path) -> None:
    text = page.figures("step", folder)
    assert text.startswith("\n| case | contender | time | ratio to baseline | peak | target |\n")
    assert "\n\n*`python -m benchmarks step`: " in text
