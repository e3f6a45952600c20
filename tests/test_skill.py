"""The ten tasks of SKILL.md, done from top to bottom in one folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "SKILL.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# What each task shows: of what it prints, or leaves behind.
SHOWN = {
    1: r"loss 1\.\d+ -> 0\.\d+",
    2: r"loss 0\.0\d+",
    3: r"6/6",
    4: r"data=",
    5: r"is equal to one device after 3 steps",
    6: r"8/8",
    7: r"data=2 \d+\ndata=2 zero=3 \d+\ndata=2 zero=3 recompute=full \d+",
    8: r"report\.html",
    9: r"weights",
    10: r"loss \d",
}
LEFT = {1: "checkpoint", 8: "report.html", 9: "weights/model.safetensors", 10: "finetuned/config.json"}


def tasks() -> dict[int, str]:
    return {
        int(number): text for number, text in re.findall(r"^## (\d+)\. (.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    }


def do(text: str, folder: Path) -> str:
    """Save the files of a task and type its commands; returns what they print."""
    for name, content in re.findall(r"[Ss]ave as `([\w.]+)`:\n\n```\w+\n(.*?)^```$", text, re.M | re.S):
        (folder / name).write_text(content, encoding="utf-8")
    (commands,) = (body for kind, body in FENCE.findall(text) if kind == "sh")
    environment = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_ten_tasks_are_done_by_what_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    modules = {"echelon": "-m echelon", "python": "", "torchrun": "-m torch.distributed.run --standalone"}
    for name, arguments in modules.items():
        script = tmp_path / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        script.chmod(0o755)
    for number, text in tasks().items():
        printed = do(text, tmp_path)
        assert re.search(SHOWN[number], printed), f"task {number}:\n{printed}"
        assert number not in LEFT or (tmp_path / LEFT[number]).exists(), f"task {number}"


def test_there_are_ten_tasks_and_each_has_commands() -> None:
    assert list(tasks()) == list(range(1, 11)) == list(SHOWN)
    for number, text in tasks().items():
        assert [kind for kind, _ in FENCE.findall(text)].count("sh") == 1, number
        assert {"python", "toml"}.issuperset(kind for kind, _ in FENCE.findall(text) if kind != "sh")


def test_the_page_says_when_to_use_it() -> None:
    head = re.match(r"---\nname: echelon\ndescription: (.+)\n---\n", TEXT)
    assert head is not None
    assert len(head[1]) < 500
