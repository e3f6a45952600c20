"""echelon report and echelon watch."""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.cli.commands import output
from tests.report.folders import write_run
from tests.train.test_write_text import byte_model


def test_a_page_is_written_into_the_run_or_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (write_run(tmp_path, name=name) for name in ("a", "b"))
    code, out, _ = output(capsys, "report", str(first), "--quick")
    assert code == 0
    assert "the page is" in out
    assert (first / "report.html").read_text().startswith("<!doctype html>")
    page = tmp_path / "both.html"
    code, out, _ = output(capsys, "report", str(first), str(second), "--quick", "--out", str(page), "--json")
    assert (code, json.loads(out)) == (0, {"page": str(page), "bytes": page.stat().st_size})


def test_what_is_no_run_and_a_place_that_cannot_be_written_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = output(capsys, "report", str(tmp_path / "none"))
    assert code == 2
    assert "does not exist; give the folder of a run" in err
    code, _, err = output(
        capsys, "report", str(write_run(tmp_path)), "--quick", "--out", str(tmp_path / "no" / "page.html")
    )
    assert code == 2
    assert "cannot be written: No such file" in err


@pytest.mark.slow
def test_watch_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "echelon", "watch", str(write_run(tmp_path)), "--quick"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = line.split()[4]
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert b"<!doctype html>" in answer.read()
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Traceback" not in err


def test_it_prints_the_text_or_an_object(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = byte_model(tmp_path)
    code, out, err = output(capsys, "generate", str(run), "import", "--tokens", "4")
    assert (code, err) == (0, "")
    assert out.startswith("import")
    code, text, _ = output(capsys, "generate", str(run), "import", "--tokens", "4", "--json")
    summary = json.loads(text)
    assert (code, summary["tokens"], summary["ended"]) == (0, 4, False)
    assert out == summary["text"] + "\n"


def test_all_numbers_are_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = output(
        capsys, "generate", str(byte_model(tmp_path)), "a", "--tokens", "-1", "--top-k", "0"
    )
    assert code == 2
    assert "length=-1" in err
    assert "top_k=0" in err
