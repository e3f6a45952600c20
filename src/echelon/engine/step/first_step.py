"""Checks of the first step, before its update: a step that one rank refuses is refused by all, and no weight
has changed."""

from typing import final

from echelon.collectives.agreement import check_on_every_rank
from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.parallel.observer import Observers
from echelon.parallel.stage import LocalStages


@final
class FirstStepChecks:
    """Open until a step was not refused for what it has shown."""

    def __init__(self, mesh: Mesh, local: LocalStages, observers: Observers) -> None:
        self._mesh, self._local, self._observers = mesh, local, observers
        self._is_open = mesh.plan.sync != "async"  # asynchronous workers do not wait for each other
        self.compares_buffers = True

    def decide(self) -> None:
        """The gradients are there: raise on every rank what any has found."""
        self._observers.tell("after_passes")
        if not self._is_open:
            if self._mesh.plan.sync == "async":
                self._observers.tell("check_first_step")
            return
        differing = self._differing_buffers()
        check_on_every_rank(lambda: self._check(differing))
        self._is_open = False

    def _differing_buffers(self) -> list[str]:
        if not self.compares_buffers:
            return []
        return [name for stage in self._local.stages.values() for name in stage.differing_buffers()]

    def _check(self, differing: list[str]) -> None:
        for sharing in self._local.sharings:
            sharing.end_watch()
        self._observers.tell("check_first_step")
        if differing:
            raise UserError(
                f"plan '{self._mesh.plan}': {', '.join(differing)}: the forward computes these buffers from "
                "its batch, and each replica has those of its own samples; use data=1, or average them over "
                "ranks in the forward, or audit='off' to keep those of replica 0"
            )
