"""Groups of ranks, their operations, and the ledger of the bytes that those moved."""

from echelon.collectives.boundary import Copy, HostBoundary, LateFetch, make_boundary
from echelon.collectives.comparison import MismatchError, about_content, current_content
from echelon.collectives.group import Group, Handle, Reduction
from echelon.collectives.ledger import Ledger, Move, StepMoves, Traffic
from echelon.collectives.mesh import Edge, Edges, disjoint_pairs, edges_over
from echelon.collectives.recording_group import CompletedWork, RecordingGroup
from echelon.collectives.ring import naive_all_reduce, ring_all_reduce
from echelon.collectives.shared.group import group_over
from echelon.collectives.torch_group import TorchGroup
from echelon.collectives.work import Work

__all__ = [
    "CompletedWork",
    "Copy",
    "Edge",
    "Edges",
    "Group",
    "Handle",
    "HostBoundary",
    "LateFetch",
    "Ledger",
    "MismatchError",
    "Move",
    "RecordingGroup",
    "Reduction",
    "StepMoves",
    "TorchGroup",
    "Traffic",
    "Work",
    "about_content",
    "current_content",
    "disjoint_pairs",
    "edges_over",
    "group_over",
    "make_boundary",
    "naive_all_reduce",
    "ring_all_reduce",
]
