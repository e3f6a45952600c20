"""`echelon import`."""

import json
from pathlib import Path

import pytest
import torch

from tests.cli.commands import output


def test_it_says_what_it_wrote(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    command = ["import", str(tmp_path / "a.pt"), "--out", str(tmp_path / "out")]
    code, _, err = output(capsys, *command)
    assert code == 2
    assert "--unsafe-pickle" in err
    code, out, _ = output(capsys, *command, "--unsafe-pickle")
    assert code == 0
    assert "1 tensors, 8 B, from torch.save" in " ".join(out.split())
    code, out, _ = output(capsys, *command, "--unsafe-pickle", "--json")
    assert json.loads(out)["tensors"] == 1
    code, _, err = output(capsys, *command, "--unsafe-pickle", "--to", "checkpoint")
    assert code == 2
    assert "leave out --to checkpoint" in " ".join(err.split())
