"""A sequence that several ranks share: which rank holds which positions, and attention over all of them.

parts        which positions a rank holds, which attend to which, and what layers see of the sequence
blocks       attention of some queries to some keys, its gradients, and how results merge
ring         ring attention
all_to_all   attention by heads
"""

from echelon.parallel.context.all_to_all import AllToAllView, all_to_all_attention, head_errors
from echelon.parallel.context.parts import SharedView, count_before, positions, put_together, take
from echelon.parallel.context.ring import RingView, ring_attention

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
