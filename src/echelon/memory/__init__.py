"""What memory holds, by category."""

from echelon.memory.meter import CATEGORIES, Memory, Meter

__all__ = ["CATEGORIES", "Memory", "Meter"]
