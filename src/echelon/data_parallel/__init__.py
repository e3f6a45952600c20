"""Ways for replicas along `data` to stay equal."""

from echelon.data_parallel.all_reduce import AllReduce
from echelon.data_parallel.sync import Alone, Sync

__all__ = ["AllReduce", "Alone", "Sync"]
