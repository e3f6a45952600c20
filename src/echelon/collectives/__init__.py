"""Groups of ranks, what they can do together, and the ledger of what that moved."""

from echelon.collectives.group import Group, Handle, Reduction
from echelon.collectives.ledger import Ledger, Move, Total, Traffic
from echelon.collectives.local import RecordingGroup
from echelon.collectives.ring import naive_all_reduce, ring_all_reduce
from echelon.collectives.shared import SharedGroup, group_over
from echelon.collectives.torch_group import TorchGroup

__all__ = [
    "Group",
    "Handle",
    "Ledger",
    "Move",
    "RecordingGroup",
    "Reduction",
    "SharedGroup",
    "TorchGroup",
    "Total",
    "Traffic",
    "group_over",
    "naive_all_reduce",
    "ring_all_reduce",
]
