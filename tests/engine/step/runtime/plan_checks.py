"""Checks of many plans, divided among processes: the ranks of one plan are threads, and take turns."""

import gc
import traceback
from collections.abc import Sequence
from typing import final

import torch.distributed as dist

from echelon.launching import Ranks
from tests.engine.step.runtime.number_training import check_training, edges_of_mesh

_BATCH = 32  # plans that the processes check at once, ahead of the tests that ask for them


@final
class PlanChecks:
    """The error of each plan, found when one is asked for that was not checked yet."""

    def __init__(self, processes: Ranks, plans: Sequence[str]) -> None:
        self._processes, self._plans = processes, plans
        self._errors: dict[str, str | None] = {}

    def error_of(self, plan: str) -> str | None:
        """None if training with this plan is correct, and does not deadlock."""
        if plan not in self._errors:
            begin = self._plans.index(plan)
            batch = self._plans[begin : begin + _BATCH]
            for errors in self._processes.run(check_part, batch):
                self._errors.update(errors)
        return self._errors[plan]


def check_part(plans: Sequence[str]) -> dict[str, str | None]:
    """The errors of this process's part of the plans. Garbage is collected once: this saves a fifth."""
    gc.disable()
    try:
        return {plan: check(plan) for plan in plans[dist.get_rank() :: dist.get_world_size()]}
    finally:
        gc.enable()
        gc.collect()


def check(plan: str) -> str | None:
    try:
        check_training(plan, edges_of_mesh, lazy=True)
    except Exception:  # of any kind: the test of this plan shows it
        return traceback.format_exc()
    return None
