"""The memory of this process, measured in ways that suit every contender, whoever allocated it.

A process never gives back all that it held, so each contender is measured in a process of its own.
"""

import gc
import resource
import sys

import torch
from torch import Tensor, nn


def peak_bytes() -> int:
    """The most memory that this process has held, on its CUDA device or else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def alive_bytes() -> int:
    """The bytes behind every tensor that Python can reach: between steps, what a model's state takes.

    A distributed tensor counts as the part that is here, which is a plain tensor of its own.
    """
    gc.collect()
    found = [its for its in gc.get_objects() if type(its) in (Tensor, nn.Parameter)]
    found += [its.grad for its in found if its.is_leaf and type(its.grad) is Tensor]
    storages = {(s.device, s.data_ptr()): s.nbytes() for s in (tensor.untyped_storage() for tensor in found)}
    return sum(storages.values())
