"""Less memory for activations: recompute, gist, activation offload; and the meter of bytes by category."""

from echelon.memory.meter import CATEGORIES, HOST_CATEGORIES, Memory, Meter

__all__ = ["CATEGORIES", "HOST_CATEGORIES", "Memory", "Meter"]
