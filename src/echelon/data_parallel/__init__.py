"""Ways for replicas along `data` to stay equal."""

from echelon.data_parallel.all_reduce import AllReduce
from echelon.data_parallel.asynchronous import Asynchronous, Push
from echelon.data_parallel.parameter_server import ParameterServer
from echelon.data_parallel.several import Several
from echelon.data_parallel.sync import Alone, Storages, Sync
from echelon.data_parallel.tied import Bond, Tied
from echelon.data_parallel.update import Outcome, Synchronous, Update
from echelon.data_parallel.zero import Zero

__all__ = [
    "AllReduce",
    "Alone",
    "Asynchronous",
    "Bond",
    "Outcome",
    "ParameterServer",
    "Push",
    "Several",
    "Storages",
    "Sync",
    "Synchronous",
    "Tied",
    "Update",
    "Zero",
]
