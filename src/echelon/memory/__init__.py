"""What memory holds, by category."""

from echelon.memory.meter import CATEGORIES, HOST_CATEGORIES, Memory, Meter

__all__ = ["CATEGORIES", "HOST_CATEGORIES", "Memory", "Meter"]
