"""Plans as plain data: fields, each described once. Imports nothing but the standard library."""

from echelon.plan.axes import AUTO
from echelon.plan.plan import FIELDS, Plan
from echelon.plan.schedule import ASYNCHRONOUS_SCHEDULES, FLUSHED_SCHEDULES, SCHEDULES

__all__ = ["ASYNCHRONOUS_SCHEDULES", "AUTO", "FIELDS", "FLUSHED_SCHEDULES", "SCHEDULES", "Plan"]
