"""Plans as plain data. Imports nothing but the standard library."""

from echelon.plan.fields import ASYNCHRONOUS_SCHEDULES, AUTO, FLUSHED_SCHEDULES, SCHEDULES
from echelon.plan.plan import Plan

__all__ = ["ASYNCHRONOUS_SCHEDULES", "AUTO", "FLUSHED_SCHEDULES", "SCHEDULES", "Plan"]
