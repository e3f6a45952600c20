"""echelon checkpoint show, and echelon export."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from echelon.cli.main import run as command
from tests.cli.commands import output
from tests.train.test_export_run import language_job, saved_run, tiny


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved_run(tmp_path / "run", language_job(), tiny())
    assert command(["export", str(tmp_path / "run"), "--to", "hf", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 1
    assert command(["checkpoint", "show", str(tmp_path / "run"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["step"], shown["plan"], shown["whole"]) == (1, "data=1", True)
    weights, optimizer = shown["sizes"]["weights"], shown["sizes"]["optimizer"]
    assert optimizer["tensors"] == 3 * weights["tensors"]  # two averages, and the number of steps
    assert optimizer["bytes"] == 2 * weights["bytes"] + 4 * weights["tensors"]
    assert command(["checkpoint", "show", str(tmp_path / "run")]) == 0
    assert "all hashes right" in capsys.readouterr().out
    file = tmp_path / "run" / "checkpoints" / "step-00000001" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    before = shutil.copytree(file.parent, file.parent.with_name("step-00000000"))
    for words in (
        ["checkpoint", "show", str(tmp_path / "run")],
        ["export", str(tmp_path / "run"), "--to", "hf"],
    ):
        assert command(words) == 2
        error = capsys.readouterr().err
        assert f"{file}: is damaged" in error
        assert f"  - give the one before it: {before}" in error


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
