"""The planner: splits a model's layers into stages. Needs no process group, and here no torch."""

from echelon.planner.cost import MODELS, CostModel, Echelon, PipeDream
from echelon.planner.graph import Node, Profile, chain, make_profile
from echelon.planner.partitioning import partition
from echelon.planner.profile_file import profile_of, read_profile, to_dict, write_profile
from echelon.planner.result import Partition, Stage

__all__ = [
    "MODELS",
    "CostModel",
    "Echelon",
    "Node",
    "Partition",
    "PipeDream",
    "Profile",
    "Stage",
    "chain",
    "make_profile",
    "partition",
    "profile_of",
    "read_profile",
    "to_dict",
    "write_profile",
]
