"""Packages that lie in a folder of their own, which `make` fills; programs that use them run in processes of
their own, because transformers imports some of them wherever it finds them.
"""

import json
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = Path(__file__).parent / "programs"
FOLDER = Path(os.environ.get("ECHELON_TEST_PACKAGES") or Path(sys.prefix) / "integrations")


def need(*names: str) -> None:
    """Skip a test whose packages are not there."""
    for name in names:
        if PathFinder.find_spec(name, [*sys.path, str(FOLDER)]) is None:
            pytest.skip(f"{name} is not installed (make installs it into .venv/integrations)")


def run_program(name: str, *arguments: str, ranks: int = 1, folder: Path | None = None) -> Any:
    """Run a program, with `ranks` under torchrun; returns the JSON of the last line that it prints. FOLDER
    tells it where it may write."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(launcher if ranks > 1 else []), str(PROGRAMS / name), *arguments]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), str(FOLDER)]),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
        "FOLDER": str(folder),
        "HOME": str(folder or Path.home()),
    }
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])
