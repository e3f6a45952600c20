"""Starts ranks: as processes of this machine (`launch`, `Ranks`), or joins those of torchrun (`join`).

Ranks are started, watched and ended here. How they communicate is in `echelon.collectives`.
Importing this package does not import torch.
"""

from echelon.launching.channel import is_launched_rank, send_message
from echelon.launching.preloading import TRAINING_MODULES, preload, start_fork_server
from echelon.launching.ranks import Ranks, launch
from echelon.launching.torchrun import RemoteResult, join
from echelon.launching.watch.failure import PeerLost, RankFailed, RankHung
from echelon.launching.watch.pulse import (
    at_instruction,
    beat,
    enter_operation,
    finish_step,
    host_work,
    leave_operation,
    start_step,
)

__all__ = [
    "TRAINING_MODULES",
    "PeerLost",
    "RankFailed",
    "RankHung",
    "Ranks",
    "RemoteResult",
    "at_instruction",
    "beat",
    "enter_operation",
    "finish_step",
    "host_work",
    "is_launched_rank",
    "join",
    "launch",
    "leave_operation",
    "preload",
    "send_message",
    "start_fork_server",
    "start_step",
]
