"""From the gradients of one rank's samples to new weights: the interface, and the synchronous way."""

from abc import ABC, abstractmethod
from typing import NamedTuple, final

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.data_parallel.asynchronous.log import Push
from echelon.data_parallel.gradients import clip_factor, squared_norm
from echelon.data_parallel.sync import Sync
from echelon.errors import UserError
from echelon.optim.local import state_tensors
from echelon.ownership import Held, Owned, own_state
from echelon.precision import Stepper


class Outcome(NamedTuple):
    """What an update tells: the loss total, how much it is the total of, the norm of the mean's gradient."""

    total: float
    counted: float
    norm: float


class Update(ABC):
    """One way to turn the work of all replicas into new weights."""

    optimizer: torch.optim.Optimizer
    lockstep: bool  # as in Sync
    sharded: bool  # whether ranks own different things

    @abstractmethod
    def start_step(self) -> float:
        """Begin; returns what to divide the loss total by before the backward pass."""

    @abstractmethod
    def finish_step(self, tally: Tensor) -> Outcome:
        """All gradients of this rank are there, and its (loss total, count): bring new weights about."""

    def settle(self) -> None:  # noqa: B027 (nothing to do where every step ends settled)
        """Bring the newest weights to every rank: before all ranks do something together between steps."""

    def log(self) -> list[Push]:
        """Which worker's step made which version: there is none where all make each version together."""
        return []

    @abstractmethod
    def agree(self, tally: Tensor) -> tuple[float, float]:
        """(loss total, count) over all replicas: the same numbers on every rank."""

    @abstractmethod
    def owned(self) -> list[Owned]:
        """Every slice of weights and optimizer state that this rank holds."""

    @abstractmethod
    def storages(self) -> dict[str, list[Tensor]]:
        """The tensors whose memory holds parameters, gradients and optimizer state now."""


@final
class Synchronous(Update):
    """Every step waits for every replica: the mean over the global batch, then one optimizer step."""

    def __init__(
        self,
        sync: Sync,
        stepper: Stepper,
        group: Group,
        clip: float | None,
        *,
        everyone: Group,
        steady: bool = True,
    ) -> None:
        """`group`: the ranks whose numbers make one update; `everyone`: those that share the global batch.

        `steady`: all of them are at the same update, so that one's count can scale the next one's losses.
        """
        self.sync, self.stepper, self._group, self._clip = sync, stepper, group, clip
        self._everyone, self._steady = everyone, steady
        self.optimizer = stepper.optimizer
        self.lockstep, self.sharded = sync.lockstep, sync.sharded
        # Gradients are taken of total / normaliser. It is the count of the step before: the same on every
        # rank, known before the backward pass, and right whenever the count does not change.
        self._normaliser = 1.0

    def start_step(self) -> float:
        self.sync.start_step()
        return self._normaliser

    def finish_step(self, tally: Tensor) -> Outcome:
        self.sync.finish_gradients()
        square = squared_norm(self.sync.norm_share(), tally.device)
        summed = _sum(torch.cat([tally, square.view(1)]), self._group, may_be_empty=not self._steady)
        total, count, square_of_all = summed
        if count == 0:  # a microbatch without samples is an update that changes nothing
            return Outcome(total, count, 0.0)
        to_mean = self._normaliser / count
        norm = to_mean * square_of_all**0.5
        self.stepper.step(to_mean * clip_factor(norm, self._clip))
        if self._steady:
            self._normaliser = count
        self.sync.finish_step()
        return Outcome(total, count, norm)

    def agree(self, tally: Tensor) -> tuple[float, float]:
        total, count = _sum(tally, self._everyone)
        return total, count

    def owned(self) -> list[Owned]:
        owned = self.sync.owned()
        for held in self.sync.held():
            slices = self.sync.slices(held)
            for key, value in self._state(held).items():
                owned += own_state(key, value, slices)
        return owned

    def storages(self) -> dict[str, list[Tensor]]:
        weights = self.sync.storages()
        state = [tensor for held in self.sync.held() for tensor in self._state(held).values()]
        return {
            "parameters": weights.parameters,
            "gradients": weights.gradients,
            "optimizer": state + self.stepper.masters(),
        }

    def _state(self, held: Held) -> dict[str, Tensor]:
        return state_tensors(self.optimizer, self.stepper.updated(held))


def _sum(tally: Tensor, group: Group, *, may_be_empty: bool = False) -> list[float]:
    """(loss total, count, …) over all ranks of the group."""
    with group.ledger.about("metrics"):
        group.all_reduce(tally)
    values: list[float] = tally.tolist()
    if values[1] == 0 and not may_be_empty:
        raise UserError("no replica had a sample that the loss counts; give the step one that has")
    return values
