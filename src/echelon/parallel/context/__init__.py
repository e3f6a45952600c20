"""A sequence that several ranks share: which rank holds which positions, and attention over all of them.

parts                which positions a rank holds, and which attend to which
inputs               what attention over several ranks demands of its inputs
tiles                attention of some queries to some keys in plain torch, and its gradients
flash                the same by torch's kernels
blocks               which of the two computes a block, and how results merge
ring_exchange        messages around a ring of ranks
returning_gradients  gradients on their way around the ring
ring                 ring attention
all_to_all           attention by heads
view                 what layers see of the sequence
"""

from echelon.parallel.context.all_to_all import all_to_all_attention, head_errors
from echelon.parallel.context.parts import count_before, positions, put_together, take
from echelon.parallel.context.ring import ring_attention
from echelon.parallel.context.view import AllToAllView, RingView, SharedView

__all__ = [
    "AllToAllView",
    "RingView",
    "SharedView",
    "all_to_all_attention",
    "count_before",
    "head_errors",
    "positions",
    "put_together",
    "ring_attention",
    "take",
]
