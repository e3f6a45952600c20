"""A sequence that several ranks share: which rank holds which positions, and attention over all of them.

parts        which positions a rank holds, and which attend to which
blocks       attention of some queries to some keys, its gradients, and how results merge
ring         ring attention
all_to_all   attention by heads
view         what layers see of the sequence
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
