"""What the first step shows of a model, all ranks told before its update: a step that one rank refuses for it
is refused by all, and no weight has changed.

Weights that a pass changes where they come and go; hooks on weights that see parts of a gradient; buffers
that replicas compute from different samples; layers that compute something else when they run again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from echelon.collectives.mesh import Mesh
from echelon.engine.model_checks import is_cut
from echelon.engine.step.weight_hooks import WeightHooks
from echelon.errors import UserError
from echelon.launching.group import check_on_every_rank
from echelon.parallel.stage import LocalStages


@final
class FirstStepChecks:
    """Open until a step was not refused for what it has shown."""

    def __init__(self, mesh: Mesh, local: LocalStages) -> None:
        self._mesh, self._local = mesh, local
        self._is_open = mesh.plan.sync != "async"  # asynchronous workers wait for nobody
        self.compares_buffers = True
        self.check_gates: Callable[[], None] = lambda: None  # raises if one was not recorded
        trained = [pair for sharing in local.sharings for pair in sharing.parameter_set.trained]
        self._hooks = WeightHooks(trained, mesh.plan)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around the passes of a step."""
        if not self._is_open or not is_cut(self._mesh.plan):
            yield
            return
        with self._hooks.watch():
            yield

    def decide(self) -> None:
        """The gradients are there: raise on every rank what any has found."""
        for stage in self._local.stages.values():
            stage.finish_passes()
        if not self._is_open:
            self._check_second_runs()  # of asynchronous workers, each for itself
            return
        differing = self._differing_buffers()
        check_on_every_rank(lambda: self._check(differing))
        self._is_open = False

    def _differing_buffers(self) -> list[str]:
        if not self.compares_buffers:
            return []
        return [name for stage in self._local.stages.values() for name in stage.differing_buffers()]

    def _check_second_runs(self) -> None:
        for stage in self._local.stages.values():
            stage.check_second_runs()

    def _check(self, differing: list[str]) -> None:
        for sharing in self._local.sharings:
            sharing.end_watch()
        self._check_second_runs()
        self._hooks.check()
        self.check_gates()
        if differing:
            raise UserError(
                f"plan '{self._mesh.plan}': {', '.join(differing)}: the forward computes these buffers from "
                "its batch, and each replica has those of its own samples; use data=1, or average them over "
                "ranks in the forward, or audit='off' to keep those of replica 0"
            )
