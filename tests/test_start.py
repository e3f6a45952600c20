"""The tutorial, docs/start.md, typed from top to bottom in a fresh folder."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent


def steps_of_page() -> list[tuple[str, str]]:
    """What is typed, by language, below the heading of the installation. The opening only shows a command."""
    _, body = PAGE.split("\n## 1. Install\n")
    return [
        (kind, text) for kind, text in re.findall(r"^```(\w+)\n(.*?)^```$", body, re.DOTALL | re.MULTILINE)
    ]


@pytest.mark.slow
def test_the_tutorial_leads_to_a_model_that_writes(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, arguments in {"echelon": "-m echelon", "python": ""}.items():
        script = f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n'
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
    }
    (name,) = re.findall(r"Save this as `([\w.]+)`", PAGE)
    printed = []
    for kind, text in steps_of_page():
        if kind == "toml":
            (tmp_path / name).write_text(text, encoding="utf-8")
            assert len(text.splitlines()) <= 15, "a job to fine-tune is short"
            continue
        if kind == "console":  # the installation, of which this process is a part
            continue
        command = ["bash", "-euo", "pipefail", "-c", text] if kind == "sh" else [sys.executable, "-c", text]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=600, cwd=tmp_path, env=environment, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        printed.append(done.stdout)
    trained, written, loaded = printed[-4:-1]
    first, last = map(float, re.findall(r"loss (\d\.\d+) → (\d\.\d+)", trained)[0])
    assert last < first - 1.5, "it has learned"
    assert written.startswith("def main(")
    assert "import " in loaded
    assert "is equal to one device" in printed[-1]
