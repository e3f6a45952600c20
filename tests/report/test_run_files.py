"""Run folders in any state: what can be read is read, and the rest is said."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from echelon.errors import UserError
from echelon.report.run_files import read_run
from tests.report.folders import write_run


def test_a_whole_folder_is_read_without_a_note(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    assert run.notes == []
    assert run.steps["step"].tolist() == list(range(1, 21))
    assert run.steps["skipped"].sum() == 1
    assert run.evaluations["step"].tolist() == [5, 10, 15, 20]
    assert run.saved == [5, 10, 15, 20]
    assert len(run.measured["ranks"]) == 2
    assert run.trace["otherData"]["plan"] == "data=2"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist; give the folder of a run"):
        read_run(tmp_path / "none")
    with pytest.raises(UserError, match=r"has neither run\.json nor metrics\.jsonl"):
        read_run(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file; give the folder"):
        read_run(tmp_path / "file")


def test_half_lines_and_strange_values_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path, steps=3)
    lines = (folder / "metrics.jsonl").read_text()
    strange = [
        '{"kind": "step", "step": 4, "loss": null, "seconds": "fast", "tokens": true}',
        '{"kind": "step", "step": -1}',
        '{"kind": "step", "step": 1e400}',
        '{"kind": "step", "step": 5, "loss": ' + "9" * 400 + "}",
        '{"kind": "step", "step": 2, "loss": 7.0, "experts": [{"gate": 1, "tokens": [1, "x", -3]}, 5]}',
        "[1, 2]",
        "null",
        '{"kind": "other", "step": 9}',
        '{"kind": "step", "step": 6, "lo',
    ]
    (folder / "metrics.jsonl").write_text(lines + "\n".join(strange))
    run = read_run(folder)
    assert run.steps["step"].tolist() == [1, 2, 3, 4, 5]
    assert np.isnan(run.steps["loss"][3])
    assert run.steps["loss"][1] == 7.0, "the last line of a step counts"
    assert run.gates == [
        {"gate": "1", "tokens": [1.0, 0.0, 0.0], "dropped": None, "entropy": None, "busiest": 3.0}
    ]
    assert run.notes == ["metrics.jsonl: 3 lines that are not JSON objects are left out"]


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 10_000, '{"a": 1}\x00', "\ud800"])
def test_a_file_that_is_no_object_is_left_out_with_a_note(content: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    for name in ("run.json", "measured.json", "trace.json"):
        (folder / name).write_bytes(content.encode(errors="surrogatepass"))
    run = read_run(folder)
    assert (run.about, run.measured, run.trace) == ({}, {}, {})
    assert [note.split()[0] for note in run.notes] == ["run.json", "measured.json", "trace.json"]


def test_what_is_missing_is_empty_and_links_are_not_followed(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    for name in ("run.json", "measured.json", "saved.jsonl"):
        (folder / name).unlink()
    (tmp_path / "elsewhere").write_text(json.dumps({"secret": 1}))
    os.symlink(tmp_path / "elsewhere", folder / "measured.json")
    run = read_run(folder)
    assert (run.about, run.measured, run.saved) == ({}, {}, [])
    assert "run.json is missing" in run.notes[0]
    assert "is a link" in run.notes[1]
