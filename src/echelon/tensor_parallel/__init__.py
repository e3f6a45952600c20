"""Tensor parallelism: the matrices of a model split over ranks, by a table of its modules.

styles    what can be done with a module, and the tables of the models that are known
shards    which part of a parameter a rank holds
moves     what ranks do together: gather and sum
columns   matrices that share an input, whose gradient is summed behind those of the weights
regions   the ways into and out of the split part of a layer
modules   what split modules compute
loss      the cross-entropy of logits that are split by vocabulary
checks    what cannot be split, and why
split     applies a table to a model
"""

from echelon.tensor_parallel.loss import SPLIT_LOSSES, split_loss, vocabulary_cross_entropy
from echelon.tensor_parallel.modules import number_layers
from echelon.tensor_parallel.regions import Region
from echelon.tensor_parallel.shards import Shard
from echelon.tensor_parallel.split import Sharded, split_over
from echelon.tensor_parallel.styles import TABLES, Table

__all__ = [
    "SPLIT_LOSSES",
    "TABLES",
    "Region",
    "Shard",
    "Sharded",
    "Table",
    "number_layers",
    "split_loss",
    "split_over",
    "vocabulary_cross_entropy",
]
