"""A sequence that several ranks share: which rank holds which positions, and attention over all of them.

parts          which positions a rank holds, and which attend to which
tiles          attention of some queries to some keys, and its gradients
ring_exchange  messages around a ring of ranks
ring           ring attention
view           what layers see of the sequence
"""

from echelon.context_parallel.parts import positions, put_together, take
from echelon.context_parallel.ring import ring_attention
from echelon.context_parallel.view import RingView

__all__ = ["RingView", "positions", "put_together", "ring_attention", "take"]
