"""Tensor parallelism: the matrices of a model split over ranks, by a table of its modules.

styles    what a table can say of a module, and the tables of known models
numbers   integers that modules compute with
shards    which part of a parameter a rank holds
moves     collectives: gather and sum
columns   matrices of one input: the sum of its gradient runs behind other work
regions   the entries and exits of the split part of a layer
entries   what happens there, as nodes of autograd's graph
in_graph  the same inside the graphs of torch.compile
operators collectives that torch.compile records
modules   the forward passes of split modules
norms     norms over features that are split
head_arguments  arguments of attention with a part for each head
loss      the cross-entropy of logits that are split by vocabulary
checks    what cannot be split, and why
proposal  a table to paste, where there is none
split     applies a table to a model
"""

from echelon.parallel.tensor.loss import SPLIT_LOSSES, split_loss, vocabulary_cross_entropy
from echelon.parallel.tensor.modules import Column, number_layers, prepare_compiling
from echelon.parallel.tensor.regions import Region
from echelon.parallel.tensor.split import Sharded, split_over
from echelon.parallel.tensor.styles import TABLES, Table

__all__ = [
    "SPLIT_LOSSES",
    "TABLES",
    "Column",
    "Region",
    "Sharded",
    "Table",
    "number_layers",
    "prepare_compiling",
    "split_loss",
    "split_over",
    "vocabulary_cross_entropy",
]
