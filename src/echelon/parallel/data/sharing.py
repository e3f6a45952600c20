"""The interface of how the ranks of a parameter set hold it and agree on its gradients.

A stage calls, for each step and in this order: `start_step`; for each microbatch `start_backward`, the
backward pass, `finish_backward`; `reduce`; the optimizer works on `local_parameters()`; `publish`.

Where units are updated in the backward pass (`update_in_backward`), the optimizer has worked on most of them
before `reduce` returns, and their gradients are gone.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import NamedTuple, final

from torch import Tensor, nn

from echelon.errors import UserError
from echelon.nn.autograd.leaves import is_hooked
from echelon.parallel.data import buckets
from echelon.parallel.data.grad_accumulation import Accumulation
from echelon.parallel.data.parameter_set import Claim, ParameterSet
from echelon.parallel.data.reducer import Reducer
from echelon.parallel.data.zero.host_weights import HostRun
from echelon.state.ownership import LocalParameter, OwnedSlice, Slice, whole_slice


class Problem(Enum):
    """The value is what the user reads."""

    DIFFERENT_UNITS = (
        "ranks ran different modules in this step, and with zero=3 they gather weights together; make every "
        "rank run the same modules, or use zero=2, or a smallest_unit (bytes) above the size of the modules "
        "that only some ranks run, which then stay gathered"
    )
    WRONG_COUNT = (
        "the loss counted another number than its targets told before the backward pass, in which units "
        "were updated: gradients were divided by the wrong count. Go back to the weights before this step, "
        "and use update=step"
    )
    LOST_CHANGE = (
        "a weight was changed between two steps: with delay=1 the update of the step before was still to "
        "come, and has overwritten the change; call engine.synchronize() before you change weights. This "
        "change is lost"
    )
    UNEVEN_COUNTS = (
        "the losses of several batches add up to one update, and what they counted was not known before "
        "their backward passes, so that each was divided by something else than its count, or had the loss "
        "scale of another engine. Let the loss return a mean, or echelon.Sum(total) of losses that you have "
        "divided, or call update after each, or give all engines one loss_scale"
    )
    DIFFERENT_CHANGE = (
        "weights, their hooks or training modes were changed by hand between two steps, and not alike on "
        "every rank, or not as this plan allows: each would go on with another model; make the same change "
        "on all ranks, with random numbers of one seed; in a pipeline make another engine with parallelize"
    )


class Storages(NamedTuple):
    """The tensors whose memory a strategy answers for, by category of the memory meter."""

    parameters: list[Tensor]
    gradients: list[Tensor]


class SummedUnit(NamedTuple):
    """A unit whose gradients are summed over ranks; `norm_share` is that of the sharing, for this unit.
    `present`: around what reads or writes its weights on the device."""

    local: list[LocalParameter]
    norm_share: list[Tensor]
    present: Callable[[], AbstractContextManager[None]] = nullcontext


class Sharing(ABC):
    """One way for the ranks of a parameter set to stay equal. Knows nothing of other axes."""

    # Whether ranks talk during every microbatch, so that each must run the same number of them.
    lockstep: bool = False

    # Where large matrices may add to their gradients directly; None where gradients never stay.
    accumulation: Accumulation | None = None

    # Whether a backward pass that is the last one is still to come, of no more gradients.
    awaits_last: bool = False

    # Whether the update may get gradients as backward passes compute them, or is to get sums of them.
    updates_products = True

    # Begins to reduce gradients as the backward pass completes them; None where ranks do not communicate.
    reducer: Reducer | None = None

    def __init__(self, parameter_set: ParameterSet) -> None:
        self.parameter_set = parameter_set
        self._update_unit: Callable[[SummedUnit], None] | None = None
        self._wait_for_weights: Callable[[Sequence[LocalParameter]], None] | None = None
        self._claim = Claim(parameter_set.parameters)
        self._kept: list[nn.Parameter] = []  # whose gradients are as computed until something is added
        for _, parameter in parameter_set.trained:
            buckets.set_gradient_dtype(parameter, in_float32=parameter_set.sum_in_float32)

    @abstractmethod
    def local_parameters(self) -> list[LocalParameter]:
        """Return what this rank's optimizer updates."""

    def update_in_backward(self, update: Callable[[SummedUnit], None]) -> None:
        """Call `update` in the backward pass with each unit whose gradients are summed, and free them."""
        self._update_unit = update

    def expect_weights(self, wait: Callable[[Sequence[LocalParameter]], None]) -> None:
        """New weights come from the host (offload): `wait` returns when those of some are there."""
        self._wait_for_weights = wait

    def wait_for_weights(self, local: Sequence[LocalParameter]) -> None:
        """Return when new weights of these that are on their way are there."""
        if self._wait_for_weights is not None:
            self._wait_for_weights(local)

    def summed_parameters(self) -> list[LocalParameter]:
        """Return those that have a `.grad` after `reduce`: what this rank updates, or sends to a server."""
        return self.local_parameters()

    def kept_whole(self) -> list[LocalParameter]:
        """Return those that stay whole on the device, and that no message brings after an update: their first
        use waits for new weights that are on their way (offload)."""
        return self.local_parameters()

    def unfrozen_error(self) -> UserError | None:
        """Return what to tell users of parameters of this rank that were frozen at the start, and no more."""
        return self._claim.unfrozen_error()

    @abstractmethod
    def start_step(self) -> None:
        """Forget old gradients. Also clears what a failed step left behind."""
        self._claim.check()

    @abstractmethod
    def start_backward(self, *, last: bool) -> None:
        """A microbatch's backward pass begins. `last`: no other follows in this step."""

    def start_early_backward(self) -> None:
        """Half of a backward pass begins, which may add to gradients; `start_backward` is still to come."""
        if self.reducer is not None:
            self.reducer.start_backward(reducing=False)

    def keep_products(self, used_once: Set[Tensor]) -> None:
        """Gradients of parameters that a backward pass uses once need no conversion before they are summed.
        Hooks of the user see the type of the sum."""
        trained = [p for _, p in self.parameter_set.trained if p in used_once and not is_hooked(p)]
        self._kept = buckets.keep_products(trained)

    def convert_products(self) -> None:
        """A backward pass may use parameters more often than the first one: autograd must sum in float32."""
        buckets.convert_products(self._kept)
        self._kept = []

    @abstractmethod
    def finish_backward(self) -> None:
        """The backward pass is over: parameters that it has not reached will get no gradient from it."""

    def start_reductions(self) -> None:
        """Begin to reduce all that is left: a replica without samples has had no backward pass, and where a
        loop calls passes one by one, none was known to be the last."""
        if self.reducer is not None and (self.awaits_last or not self.reducer.all_reduced):
            self.start_backward(last=True)
            self.finish_backward()

    @abstractmethod
    def reduce(self) -> None:
        """Return when `.grad` of each local parameter is the sum over ranks, or None if no rank used it."""

    def problems(self) -> dict[Problem, Tensor]:
        """Why this step must be refused: a flag on the device each. If one rank has it, all ranks refuse."""
        return {}

    def norm_share(self) -> list[Tensor]:
        """Gradients whose squares, summed over ranks, are those of the set: each counted by one rank."""
        return self._norm_share(self.local_parameters())

    def publish(self) -> None:  # noqa: B027 (nothing to do where every rank updates what it uses)
        """The optimizer has updated the local parameters: bring the weights everywhere they are used."""

    def first_weights(self) -> list[OwnedSlice]:
        """The weights that a deferred start fills on this rank; `share_first_weights` follows."""
        return own_whole(self.parameter_set)

    def share_first_weights(self) -> None:  # noqa: B027 (nothing to do where every rank has filled what it uses)
        """The weights of `first_weights` have their first values: bring them everywhere they are used."""

    def owned(self) -> list[OwnedSlice]:
        """The weights that this rank holds, frozen ones too."""
        return own_whole(self.parameter_set)

    def slices(self, local: LocalParameter) -> list[Slice]:
        """Return where the pieces of `local.tensor` lie in the whole parameter, in order."""
        return [whole_slice(local.name, local.parameter)]

    def stored_values(self, local: LocalParameter) -> Tensor:
        """The values of a local parameter between steps, on the device or in host memory."""
        return local.tensor.detach()

    def host_run(self, local: LocalParameter) -> HostRun | None:  # noqa: ARG002
        """Return where a local parameter lies in host memory, if it does."""
        return None

    def pieces_to_update(self) -> Iterator[list[LocalParameter]]:
        """Yield what is left to be updated: each piece is on the device until the next is asked for."""
        yield self.local_parameters()

    @abstractmethod
    def storages(self) -> Storages:
        """Return the memory that holds weights and gradients on this rank now."""

    def _use_unit(
        self,
        local: Sequence[LocalParameter],
        present: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """The gradients of a unit are summed: use and free them. What is summed over other ranks too has to
        wait for these, in memory of its own."""
        assert self._update_unit is not None
        waiting = self.parameter_set.summed_later
        for each in local:
            if each.parameter in waiting and each.tensor.grad is not None:
                each.tensor.grad = each.tensor.grad.clone()
        ready = [each for each in local if each.parameter not in waiting]
        self._update_unit(SummedUnit(ready, self._norm_share(ready), present))
        for each in ready:
            each.tensor.grad = None

    def _norm_share(self, local: Sequence[LocalParameter]) -> list[Tensor]:
        return local_gradients(local, self.parameter_set.uncounted)

    def gather(self, *, backward: bool) -> None:  # noqa: B027 (nothing to do where weights stay whole)
        """The stage is about to be used: begin to gather what comes first."""

    def free(self) -> None:  # noqa: B027
        """The stage was used: give back what was gathered ahead and not used."""

    def second_run(self, module: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002
        """Around a layer's forward that runs again in the backward pass: the layer has its weights."""
        return nullcontext()

    def abandon_pass(self) -> None:  # noqa: B027
        """A pass has raised: no module runs any more. Communicates with no rank."""

    def take_over(self, changed: Set[nn.Parameter]) -> None:  # noqa: B027 (nothing to do where a parameter
        # is all that is updated)
        """Between two steps: the user has changed these parameters, or given them other memory."""

    def end_watch(self) -> None:  # noqa: B027
        """Before the first update: raise if a pass has changed weights in a way that is lost."""

    def reallocate(self) -> None:
        """Move the weights to new memory; other holders keep the old."""
        for _, parameter in self.parameter_set.trained:
            parameter.data = parameter.data.clone()

    def close(self) -> None:
        """Take away all hooks, and let go of gradients and their memory."""
        for _, parameter in self.parameter_set.trained:
            if self._claim.holds(parameter):  # and no later engine
                parameter.grad = None
                buckets.restore_gradient_dtype(parameter)
        self._claim.release()


class LocalSum(Sharing):
    """Gradients only add up on this rank, in place where they can, without communication."""

    def __init__(self, parameter_set: ParameterSet) -> None:
        super().__init__(parameter_set)
        self.accumulation: Accumulation = Accumulation()

    def start_backward(self, *, last: bool) -> None:
        self.accumulation.is_open, self.accumulation.is_continued = True, not last

    def finish_backward(self) -> None:
        self.accumulation.is_open = False


@final
class SingleReplica(LocalSum):
    """One rank holds the set: there is no other to agree with."""

    def __init__(self, parameter_set: ParameterSet) -> None:
        super().__init__(parameter_set)
        self._local = whole_parameters(parameter_set)

    def local_parameters(self) -> list[LocalParameter]:
        return self._local

    def start_step(self) -> None:
        super().start_step()
        for local in self._local:
            local.parameter.grad = None

    def keep_products(self, used_once: Set[Tensor]) -> None:
        if self.updates_products:
            super().keep_products(used_once - self.parameter_set.summed_later)  # these are summed as they are

    def start_backward(self, *, last: bool) -> None:
        super().start_backward(last=last)
        self.start_early_backward()

    def start_early_backward(self) -> None:
        buckets.convert_gradients(self._kept)

    def reduce(self) -> None:
        pass

    def storages(self) -> Storages:
        parameters: list[Tensor] = list(self.parameter_set.parameters.values())
        return Storages(parameters, [p.grad for p in parameters if p.grad is not None])


def whole_parameters(parameter_set: ParameterSet) -> list[LocalParameter]:
    return [LocalParameter(name, p, p) for name, p in parameter_set.trained]


def local_gradients(
    local: Sequence[LocalParameter], uncounted: Set[nn.Parameter] = frozenset()
) -> list[Tensor]:
    """The gradients of local parameters, where there are any, without those of `uncounted` parameters."""
    counted = (each.tensor for each in local if each.parameter not in uncounted)
    return [tensor.grad for tensor in counted if tensor.grad is not None]


def own_whole(parameter_set: ParameterSet) -> list[OwnedSlice]:
    return [OwnedSlice(whole_slice(name, p), p) for name, p in parameter_set.parameters.items()]
