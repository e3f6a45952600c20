"""The planner foresees what plans take, and splits layers into stages. It needs no process group.

    from echelon.planner import partition, predict, profile, read_cluster, read_shape, search

    search(read_shape("llama3-8b"), read_cluster("h100:64"), batch=512).best[0].plan
    split = partition(profile(model, batch), workers=4, bandwidth=1e9)
    split.plan, split.layer_counts      # 'pipeline=3-1', (9, 4)

All of it is pure, but `profile`. What imports torch does so on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from echelon.planner.cost import MODELS, CostModel, Echelon, PipeDream
from echelon.planner.graph import Node, Profile, chain, make_profile
from echelon.planner.partitioning import Partition, Stage, partition
from echelon.planner.profile_file import profile_of, read_profile, to_dict, write_profile

if TYPE_CHECKING:
    from echelon.planner.cluster.read import read_cluster
    from echelon.planner.foresight.predict import predict
    from echelon.planner.profiling import profile
    from echelon.planner.searching.search import search
    from echelon.planner.shape.huggingface import read_shape

_LAZY = {
    "predict": "echelon.planner.foresight.predict",
    "profile": "echelon.planner.profiling",
    "read_cluster": "echelon.planner.cluster.read",
    "read_shape": "echelon.planner.shape.huggingface",
    "search": "echelon.planner.searching.search",
}

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
    "predict",
    "profile",
    "profile_of",
    "read_cluster",
    "read_profile",
    "read_shape",
    "search",
    "to_dict",
    "write_profile",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'echelon.planner' has no attribute '{name}'")
