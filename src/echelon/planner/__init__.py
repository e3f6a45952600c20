"""The planner measures a model's layers and splits them into stages. It needs no process group.

    from echelon.planner import partition, profile

    split = partition(profile(model, batch), workers=4, bandwidth=1e9)
    split.plan, split.layer_counts      # 'pipeline=3-1', (9, 4)

Splitting is pure; only `profile` imports torch, on first use.
"""

from typing import TYPE_CHECKING, Any

from echelon.planner.cost import MODELS, CostModel, Echelon, PipeDream
from echelon.planner.graph import Node, Profile, chain, make_profile
from echelon.planner.partitioning import Partition, Stage, partition
from echelon.planner.profile_file import profile_of, read_profile, to_dict, write_profile

if TYPE_CHECKING:
    from echelon.planner.profiling import profile

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
    "profile",
    "profile_of",
    "read_profile",
    "to_dict",
    "write_profile",
]


def __getattr__(name: str) -> Any:
    if name == "profile":
        from echelon.planner.profiling import profile

        return profile
    raise AttributeError(f"module 'echelon.planner' has no attribute '{name}'")
