"""Starting ranks: processes of this machine (`launch`, `Ranks`) or those of torchrun (`join`).

What the ranks say to each other is `echelon.collectives`; here they are started, watched and ended.
Importing this imports no torch.
"""

from echelon.launching.channel import is_launched_rank, tell
from echelon.launching.errors import PeerLost, RankFailed, RankHung
from echelon.launching.launcher import launch
from echelon.launching.preloading import TRAINING_MODULES, preload, start_early
from echelon.launching.pulse import beat, entered, left
from echelon.launching.ranks import Ranks
from echelon.launching.torchrun import join

__all__ = [
    "TRAINING_MODULES",
    "PeerLost",
    "RankFailed",
    "RankHung",
    "Ranks",
    "beat",
    "entered",
    "is_launched_rank",
    "join",
    "launch",
    "left",
    "preload",
    "start_early",
    "tell",
]
