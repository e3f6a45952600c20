"""Parameter sets, and the ways for the ranks of one to hold it and agree on its gradients."""

from echelon.data_parallel.all_reduce import AllReduce
from echelon.data_parallel.batch_norm import check_worker_norms, synchronize_batch_norm, talks_in_forward
from echelon.data_parallel.buffers import Buffers
from echelon.data_parallel.grad_accumulation import accumulate_in_place
from echelon.data_parallel.gradients import clip_factor, squared_norm
from echelon.data_parallel.host_weights import HostPlace
from echelon.data_parallel.packed_broadcast import broadcast_packed
from echelon.data_parallel.parameter_server import ParameterServer
from echelon.data_parallel.parameter_set import (
    ParameterSet,
    ShardGroups,
    SharedGradient,
    Unit,
    named_subset,
)
from echelon.data_parallel.problems import Problem
from echelon.data_parallel.shared_gradients import sum_tied, sum_within_stage
from echelon.data_parallel.sharing import LocalSum, Sharing, SingleReplica, Storages, SummedUnit
from echelon.data_parallel.unit_all_reduce import UnitAllReduce
from echelon.data_parallel.units import SMALLEST as SMALLEST_UNIT
from echelon.data_parallel.units import divide_units
from echelon.data_parallel.zero import Zero

__all__ = [
    "SMALLEST_UNIT",
    "AllReduce",
    "Buffers",
    "HostPlace",
    "LocalSum",
    "ParameterServer",
    "ParameterSet",
    "Problem",
    "ShardGroups",
    "SharedGradient",
    "Sharing",
    "SingleReplica",
    "Storages",
    "SummedUnit",
    "Unit",
    "UnitAllReduce",
    "Zero",
    "accumulate_in_place",
    "broadcast_packed",
    "check_worker_norms",
    "clip_factor",
    "divide_units",
    "named_subset",
    "squared_norm",
    "sum_tied",
    "sum_within_stage",
    "synchronize_batch_norm",
    "talks_in_forward",
]
