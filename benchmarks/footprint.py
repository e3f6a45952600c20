"""The memory of this process, measured in a way that works for every contender.

A process never returns all of its memory, so each contender is measured in a process of its own.
"""

import gc
import resource
import sys
from collections import Counter

import torch
from torch import Tensor, nn

from echelon.quantities import show_bytes


def peak_bytes() -> int:
    """The peak memory of this process: on its CUDA device, or else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def largest_pieces(number: int = 8) -> list[str]:
    """The pieces of the CUDA device's memory that are in use, by size: those that take most of it first."""
    if not torch.cuda.is_available():
        return []
    segments = torch.cuda.memory_snapshot()
    blocks = [block for segment in segments for block in segment["blocks"]]
    counts = Counter(block["size"] for block in blocks if block["state"] == "active_allocated")
    most = sorted(counts.items(), key=lambda item: item[0] * item[1], reverse=True)[:number]
    return [f"{count} × {show_bytes(size)}" for size, count in most]


def alive_bytes() -> int:
    """The bytes of every tensor that Python can reach: between steps, the state of the model and optimizer.

    Of a distributed tensor, the local part counts, which is a plain tensor. Memory that torch did not
    allocate is not state: the shared memory through which ranks communicate.
    """
    gc.collect()
    tensors = [candidate for candidate in gc.get_objects() if type(candidate) in (Tensor, nn.Parameter)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and type(tensor.grad) is Tensor]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided]
    sizes = {(s.device, s.data_ptr()): s.nbytes() for s in storages if s.resizable()}
    return sum(sizes.values())
