"""From the gradients of one rank's samples to new weights: the interface of every way."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from typing import NamedTuple

import torch
from torch import Tensor, nn

from echelon.state.checkpoint.saved import SavedState
from echelon.state.ownership import LocalParameter, OwnedSlice
from echelon.update.averaging import WeightAverages
from echelon.update.numbers import Counted, Flag, GateNumbers, Known, Number, RankNumbers, StepNumbers
from echelon.update.precision.loss_scaling import LossScaling
from echelon.update.unit_updates import UnitUpdates

InWhole = Callable[[OwnedSlice], list[OwnedSlice]]


class Push(NamedTuple):
    """One push of asynchronous training: worker `worker` took its step number `step` at version `pulled`, and
    its gradient went into version `pushed`.

    Version 0 is the start; every update makes the next one. Entries that share `pushed` were averaged.
    """

    worker: int
    step: int
    pulled: int
    pushed: int


class Update(ABC):
    """One way from the work of all replicas to new weights.

    The runner calls, for each update and in this order: `start_step`; then, at the instructions of these
    names, `tie`, `norm`, `step` (UPDATE) and `publish`.
    """

    optimizer: torch.optim.Optimizer
    numbers: StepNumbers  # of the last update
    deferred: bool = False  # whether they are not read before the step returns
    units: UnitUpdates | None = None  # where units are updated in the backward pass
    loss_scaling: LossScaling | None = None  # of fp16
    averages: WeightAverages | None = None  # of weights, where they are averaged
    number: int = 0  # of the next update, from 0; one that is refused has a number too

    @property
    def loss_scale(self) -> Number:
        """The factor of the next step's losses before their backward pass."""
        return 1.0 if self.loss_scaling is None else self.loss_scaling.scale

    def set_learning_rate(self, step: int) -> None:  # noqa: B027 (nothing to do where a server sets it)
        """Set the rate for the update of `step`, as the schedule says."""

    @abstractmethod
    def start_step(self) -> Number | None:
        """Begin; returns what the last update was the mean of, where all ranks know it: None, or 0 on a
        device, before there was one."""

    def tie(self) -> None:  # noqa: B027 (nothing to do where no stages share weights)
        """Sum the gradients of weights that several stages hold."""

    @abstractmethod
    def norm(
        self,
        tally: Tensor,
        gates: GateNumbers | None = None,
        *,
        own: int | None = 0,
        known: Known | None = None,
    ) -> None:
        """All gradients are summed: sum this rank's tally of losses, and the norm, over all ranks; also what
        `gates` add, if the model has any. Of a tally of several batches, `own` is the last row of the
        engine's own loss. `known`: what the host knows of the tally, or the numbers of a replay."""

    is_of_one_rank = False  # whether `numbers_of` has all that `norm` finds out

    def numbers_of(self, tally: Tensor, counted: Counted | None) -> RankNumbers:
        """Compute what `norm` finds out where no other rank takes part. Changes nothing and reads no device,
        so that it can be a part of a recording."""
        raise NotImplementedError

    @property
    def skips(self) -> Flag:
        """After `norm`: whether `step` changes no weight. To read a tensor is to wait for the device."""
        return self.refuses

    @property
    def refuses(self) -> Flag:
        """After `norm`: whether there are no samples, or there is a problem, so that the step changes nothing
        and is an error. A step whose gradients overflow is none: it skips its update alone."""
        return False

    @property
    def undoes(self) -> Flag:
        """After `norm`: whether the step leaves buffers as they were, too."""
        return self.refuses

    @abstractmethod
    def step(self) -> None:
        """Update the local parameters."""

    @abstractmethod
    def publish(self) -> None:
        """Bring the new weights to all ranks that use them."""

    def changed(self) -> list[LocalParameter]:
        """Return weights that the user has changed since the last update, of those that are on their way when
        a step ends, and that only this can tell of."""
        return []

    def take_over(self, changed: Set[nn.Parameter], digest: float) -> None:  # noqa: B027
        """Between two steps: the user has changed these weights by hand. `digest`: of all that was done by
        hand, an integer up to 2²⁰; where those of ranks differ, all of them refuse the next step."""

    took_other_way = False  # whether the step, on this rank, took another way than those before it

    def refuse_next(self, *, refuses: bool = True) -> None:  # noqa: B027
        """This rank cannot make the next step, and the others may not know: all of them refuse it."""

    def synchronize(self) -> None:  # noqa: B027 (nothing to do where every step ends with all ranks alike)
        """Bring the newest weights to every rank: before all ranks do something together between steps."""

    def show_newest(self) -> None:
        """The same for a reader: the next step computes as if the weights had not been read."""
        self.synchronize()

    def log(self) -> list[Push]:
        """Return which worker's step made which version; empty where all make each one together."""
        return []

    @abstractmethod
    def agree(self, tally: Tensor) -> tuple[float, float]:
        """(loss total, count) of a tally, over all replicas: the same numbers on every rank."""

    @abstractmethod
    def owned(self) -> list[OwnedSlice]:
        """Every slice of weights, masters, optimizer state and counters that this rank holds."""

    def owned_whole(self) -> list[OwnedSlice]:
        """Optimizer state that this rank holds of whole parameters, also of those that layers split."""
        return []

    @abstractmethod
    def updated_tensors(self) -> list[tuple[str, nn.Parameter]]:
        """Return the tensors that the optimizer updates on this rank, each with the name of its parameter."""

    @abstractmethod
    def load(self, saved: SavedState, in_whole: InWhole, *, state: bool = True) -> None:
        """Take masters and the optimizer's state from a checkpoint, or have none (`state`); this rank's part
        of the weights is loaded already. Talks to no one.

        `in_whole`: a box of this rank's part of a tensor as boxes of the whole one.
        """

    @abstractmethod
    def restore(self, numbers: Mapping[str, float]) -> None:
        """Go on with the numbers of a checkpoint, of all workers; all ranks have loaded what is theirs."""

    @abstractmethod
    def storages(self) -> dict[str, list[Tensor]]:
        """The tensors whose memory holds parameters, gradients and optimizer state now."""

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """Release hooks, threads and connections. After a failure (`failed`) no rank is waited for."""
