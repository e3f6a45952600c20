"""`echelon generate`."""

import json
from pathlib import Path

import pytest

from tests.cli.commands import output
from tests.train.test_write_text import byte_model


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
