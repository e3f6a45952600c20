"""Plans as plain data: fields, each described once. Imports nothing but the standard library."""

from echelon.plan.axes import ASYNCHRONOUS_SCHEDULES, AUTO, FLUSHED_SCHEDULES, SCHEDULES
from echelon.plan.plan import FIELDS, Plan

__all__ = ["ASYNCHRONOUS_SCHEDULES", "AUTO", "FIELDS", "FLUSHED_SCHEDULES", "SCHEDULES", "Plan"]
