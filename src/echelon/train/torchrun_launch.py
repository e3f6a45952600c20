"""Which run the ranks of torchrun train: after a restart (--max-restarts), the one that they trained before.

torchrun has an agent on each host, which starts the ranks, and starts them again. So a run that an agent of
today has begun is the run to go on with.
"""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from echelon.launching.byte_collectives import all_gather_bytes
from echelon.train.job import Job
from echelon.train.resume import FINISHED, read_about, runs_of


def this_launch() -> list[str]:
    """The agents of all ranks; every rank must call this."""
    return sorted({each.decode() for each in all_gather_bytes(_agent().encode())})


def run_of_launch(job: Job, launch: Sequence[str]) -> Path | None:
    """The newest run that one of these agents has begun, if it is not finished."""
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:  # another launcher, which does not start ranks again
        return None
    for path in runs_of(job):
        about = read_about(path) or {}
        agents = about.get("launch")
        if isinstance(agents, list) and set(launch) & {str(each) for each in agents}:
            return None if about.get("state") == FINISHED else path
    return None


def _agent() -> str:
    """The process that started this one: no other process, of this host or another, has the same text."""
    pid = os.getppid()
    try:
        began = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:  # not Linux
        began = ""
    return f"{socket.gethostname()} {pid} {began}"
