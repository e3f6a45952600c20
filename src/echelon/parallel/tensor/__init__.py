"""Tensor parallelism: the matrices of a model split over ranks, by a table of its modules.

styles    what a table can say of a module, the tables of known models, and what of a parameter a rank holds
entries   what happens at the ends of the split part of a layer: collectives, as nodes of autograd's graph
regions   the split parts of layers; columns of one input, whose gradient is summed behind other work
modules   the forward passes of split modules, and the cross-entropy of logits that are split by vocabulary
checks    what cannot be split, and why
proposal  a table to paste, where there is none
split     applies a table to a model
"""

from echelon.parallel.tensor.modules import SPLIT_LOSSES

__all__ = ["SPLIT_LOSSES"]
