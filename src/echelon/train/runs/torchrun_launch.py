"""Which run the ranks of torchrun train: after a restart (--max-restarts), the one that they trained before.

torchrun has an agent on each host, which starts the ranks, and starts them again. So a run that an agent of
today has begun is the run to go on with; and if it has finished before the fault, there is nothing to do.
"""

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from echelon.launching.messages.byte_collectives import all_gather_bytes
from echelon.train.jobs.job import Job, as_plain
from echelon.train.runs.resume import runs_of
from echelon.train.runs.run_state import FINISHED, read_about


class LaunchedRun(NamedTuple):
    """The folder of a run, and its summary if it has finished."""

    path: Path
    summary: dict[str, Any] | None


def this_launch() -> list[str]:
    """The agents of all ranks; every rank must call this."""
    return sorted({each.decode() for each in all_gather_bytes(_agent().encode())})


def run_of_launch(job: Job, launch: Sequence[str]) -> LaunchedRun | None:
    """The newest run that one of these agents has begun. Not one that has finished, of another job or of this
    very process: that trains once more."""
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:  # another launcher, which does not start ranks again
        return None
    for path in runs_of(job):
        about = read_about(path) or {}
        agents = about.get("launch")
        if isinstance(agents, list) and set(launch) & {str(each) for each in agents}:
            return _launched(job, path, about)
    return None


def _launched(job: Job, path: Path, about: dict[str, Any]) -> LaunchedRun | None:
    if about.get("state") != FINISHED:
        return LaunchedRun(path, None)
    is_same = about.get("job") == json.loads(json.dumps(as_plain(job))) and about.get("pid") != os.getpid()
    summary = about.get("summary")
    return LaunchedRun(path, summary) if is_same and isinstance(summary, dict) else None


def _agent() -> str:
    """The process that started this one: no other process, of this host or another, has the same text."""
    pid = os.getppid()
    try:
        began = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:  # not Linux
        began = ""
    return f"{socket.gethostname()} {pid} {began}"
