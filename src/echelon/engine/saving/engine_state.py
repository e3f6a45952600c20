"""The state of an engine on this rank: which slices of which global tensors, and its counters."""

from collections.abc import Mapping
from typing import NamedTuple, final

from torch import Tensor, nn

from echelon.collectives.mesh import Mesh
from echelon.engine.saving.checkpoints import own_number
from echelon.engine.step.step_counter import StepCounter
from echelon.parallel.stage import LocalStages
from echelon.state.ownership import OwnedSlice, StateNames, whole_slice
from echelon.update.numbers import Number
from echelon.update.update import InWhole, Update


@final
class EngineState(NamedTuple):
    """What an engine trains, as it is now."""

    mesh: Mesh
    module: nn.Module
    names: StateNames
    local: LocalStages
    in_whole: InWhole
    update: Update
    counter: StepCounter
    seed: int | None

    def owned(self) -> list[OwnedSlice]:
        """Weights, float32 masters, optimizer state, buffers and counters."""
        parts = [each for owned in self.update.owned() for each in self.in_whole(owned)]
        return [*parts, *self.update.owned_whole(), *self.buffers(), *self._counters()]

    def values(self) -> list[OwnedSlice]:
        """Weights and buffers."""
        weights = [each for owned in self.local.owned_weights() for each in self.in_whole(owned)]
        return [*weights, *self.buffers()]

    def buffers(self) -> list[OwnedSlice]:
        """The buffers of the state dict."""
        return [
            OwnedSlice(whole_slice(name, buffer), buffer)
            for name, buffer in self.module.state_dict(keep_vars=True).items()
            if isinstance(buffer, Tensor) and name in self.names.state and name not in self.names.parameters
        ]

    def _counters(self) -> list[OwnedSlice]:
        counters = {
            "steps": self.counter.updates,
            "begun steps": self.counter.begun,
            "skipped steps": self.counter.skipped,
        }
        return [*self.own_counters(counters), own_number("seed", self.seed_number)]

    def own_counters(self, counters: Mapping[str, Number]) -> list[OwnedSlice]:
        """Numbers of this rank; asynchronous workers each have their own."""
        whose = "" if self.worker is None else f" of worker {self.worker}"
        return [own_number(f"{part}{whose}", value) for part, value in counters.items()]

    @property
    def worker(self) -> int | None:
        """Which asynchronous worker this rank is of."""
        return self.mesh.position.replica if self.mesh.plan.sync == "async" else None

    @property
    def seed_number(self) -> int:
        """-1: nothing is seeded."""
        return -1 if self.seed is None else self.seed
