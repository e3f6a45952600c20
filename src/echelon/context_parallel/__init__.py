"""A sequence spread over ranks: who holds which positions, and causal attention over all of them."""

from echelon.context_parallel.parts import positions, put_together, take
from echelon.context_parallel.ring import ring_attention
from echelon.context_parallel.view import RingView

__all__ = ["RingView", "positions", "put_together", "ring_attention", "take"]
