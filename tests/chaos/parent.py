"""Kills of the process that `echelon train` runs in, and `--resume` after each."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.train.jobs.job import Job, as_plain
from tests.chaos.training import leftovers


@dataclass(frozen=True)
class ParentKill:
    """SIGKILL for the parent, `delay` seconds after a step is in metrics.jsonl; step 0: after its start."""

    step: int
    delay: float

    def __str__(self) -> str:
        return f"parent@{self.step}+{1e3 * self.delay:.1f}ms"


def train_with_resumes(job: Job, kills: Sequence[ParentKill]) -> tuple[Path, list[str]]:
    """Train in processes of their own, killed and resumed; the run, and what was wrong."""
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        for kill in (*kills, None):
            with subprocess.Popen(
                _command(job), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=_environment(folder)
            ) as process:
                pids = _await(process, Path(job.out), kill) if kill is not None else set()
                if kill is not None:
                    process.kill()
                _, errors = process.communicate(timeout=600)
            if kill is None and process.returncode != 0:
                problems.append(f"exit code {process.returncode}: {errors.decode()}")
            run = _run(Path(job.out))
            if run is not None and kill is not None:
                problems += [text for text in leftovers(run, pids) if not _is_for_resume(text)]
            problems += [f"{path} is left" for path in Path(folder).iterdir() if _is_ours(path)]
    assert run is not None
    return run, problems + leftovers(run, set())


def _is_for_resume(text: str) -> bool:
    """Removed, or used, by what goes on."""
    return ".part is left" in text or "echelon-memory-" in text


def _command(job: Job) -> list[str]:
    command = [sys.executable, "-m", "echelon", "train"]
    if _run(Path(job.out)) is not None:
        return [*command, "--resume", "--set", f"out={job.out}"]
    return [*command, *flat_settings(job)]


def flat_settings(job: Job) -> list[str]:
    """A job as options of the command line."""
    return [f"--set={key}={json.dumps(value)}" for key, value in _flat(as_plain(job))]


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs = []
    for name, value in values.items():
        pairs += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return pairs


def _environment(folder: str) -> dict[str, str]:
    return {**os.environ, "TMPDIR": folder}


def _await(process: "subprocess.Popen[bytes]", out: Path, kill: ParentKill) -> set[int]:
    """Wait for the moment; returns all processes below this one."""
    while process.poll() is None and kill.step and _last_step(out) < kill.step:
        time.sleep(0.002)
    time.sleep(kill.delay)
    return set(_below(process.pid))


def _last_step(out: Path) -> int:
    run = _run(out)
    path = None if run is None else run / "metrics.jsonl"
    if path is None or not path.exists():
        return 0
    lines = path.read_bytes().splitlines()
    return int(json.loads(lines[-1])["step"]) if lines and lines[-1].endswith(b"}") else 0


def _run(out: Path) -> Path | None:
    runs = [path.parent for path in out.glob("*/run.json")]
    return runs[0] if runs else None


def _below(pid: int) -> list[int]:
    pids: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text(encoding="utf-8").split():
                pids += [int(child), *_below(int(child))]
    except (FileNotFoundError, ProcessLookupError):
        pass
    return pids


def _is_ours(path: Path) -> bool:
    deadline = time.monotonic() + 5
    while path.name.startswith(("echelon-", "pymp-")) and path.exists():
        if time.monotonic() > deadline:
            return True
        time.sleep(0.05)
    return False
