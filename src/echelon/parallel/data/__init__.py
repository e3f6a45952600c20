"""Parameter sets, and the ways for the ranks of one to hold it and agree on its gradients."""

from echelon.parallel.data.all_reduce import AllReduce, UnitAllReduce
from echelon.parallel.data.batch_norm import check_worker_norms, synchronize_batch_norm, talks_in_forward
from echelon.parallel.data.buffers import Buffers, broadcast_packed
from echelon.parallel.data.grad_accumulation import accumulate_in_place
from echelon.parallel.data.gradients import clip_factor, squared_norm, sum_tied, sum_within_stage
from echelon.parallel.data.parameter_server import ParameterServer
from echelon.parallel.data.parameter_set import ParameterSet, ShardGroups, SharedGradient, Unit, named_subset
from echelon.parallel.data.sharing import LocalSum, Problem, Sharing, SingleReplica, Storages, SummedUnit
from echelon.parallel.data.zero.host_weights import HostPlace
from echelon.parallel.data.zero.units import SMALLEST as SMALLEST_UNIT
from echelon.parallel.data.zero.units import divide_units, unit_modules
from echelon.parallel.data.zero.zero import Zero

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
    "unit_modules",
]
