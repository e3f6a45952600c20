"""Plans as plain data. Imports nothing but the standard library."""

from echelon.plan.fields import AUTO
from echelon.plan.plan import Plan

__all__ = ["AUTO", "Plan"]
