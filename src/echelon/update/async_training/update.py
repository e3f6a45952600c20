"""The asynchronous way to new weights: pull, compute, push, and wait only for workers that are too far
behind.

    staleness 0      one update per round, of the mean over all workers: equal to bulk-synchronous training
    staleness S ≥ 1  every push is one update; a worker is at most S steps ahead of the slowest
    staleness inf    every push is one update; no worker ever waits

The loss, norm and tokens of a step are those of the update it went into: with staleness 0 of the global
batch, else of this worker's own. Whatever ranks do together between steps calls `synchronize` first.

With fp16 every worker has a loss scale of its own, and pushes what gradients are to be multiplied by beside
them. Where they are not finite, the server makes no version, and the worker's next scale is smaller.
"""

import atexit
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.collectives import Group
from echelon.parallel.data.buckets import Bucket, move_in, weight_dtype
from echelon.parallel.data.grad_accumulation import hook_gradient
from echelon.parallel.data.parameter_set import ParameterSet
from echelon.parallel.data.sharing import LocalSum, Storages, whole_parameters
from echelon.state.checkpoint.saved import SavedState, numbers_of
from echelon.state.ownership import LocalParameter, OwnedSlice, own_counter, whole_slice
from echelon.update.async_training.host import Host, flat_buckets
from echelon.update.async_training.port import SERVER, LocalPort, Port, RemotePort, open_group
from echelon.update.async_training.server import Gradient
from echelon.update.numbers import (
    GateNumbers,
    HostCopy,
    Known,
    Outcome,
    StepNumbers,
    loss_and_count,
)
from echelon.update.optim.learning_rate import LearningRate
from echelon.update.optim.local import Make, make_local, make_whole
from echelon.update.precision.loss_scaling import LossScaling
from echelon.update.precision.stepper import DirectStepper, MasterStepper
from echelon.update.update import InWhole, Push, Update


@final
class WorkerGradients(LocalSum):
    """The weights as this worker pulled them, and the gradients that it will push. The server updates."""

    def __init__(self, parameter_set: ParameterSet) -> None:
        super().__init__(parameter_set)
        self._trained = [parameter for _, parameter in parameter_set.trained]
        self._weights = flat_buckets(self._trained, dtype_of=weight_dtype)
        self.buckets = flat_buckets(self._trained)
        for bucket in self._weights:
            move_in(bucket)
        self._used: set[nn.Parameter] = set()
        # Not of `self`: a parameter may outlive this.
        arrived = partial(_arrived, self._used, self.buckets)
        self._hooks = [hook_gradient(parameter, arrived) for parameter in self._trained]

    @property
    def weights(self) -> list[Tensor]:
        return [bucket.buffer for bucket in self._weights]

    def local_parameters(self) -> list[LocalParameter]:
        return []

    def summed_parameters(self) -> list[LocalParameter]:
        return whole_parameters(self.parameter_set)

    def start_step(self) -> None:
        super().start_step()
        self._used.clear()
        for bucket in self.buckets:
            bucket.open()

    def reduce(self) -> None:
        """The gradients are complete; the server adds them to those of others."""
        for bucket in self.buckets:
            bucket.close()

    def used_flags(self) -> Tensor:
        """Return a flag for each trained parameter: it has got a gradient in this step."""
        return torch.tensor([p in self._used for p in self._trained], dtype=torch.uint8)

    def owned(self) -> list[OwnedSlice]:
        return []

    def storages(self) -> Storages:
        gradients = [bucket.buffer for bucket in self.buckets]
        return Storages(list(self.parameter_set.parameters.values()), gradients)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        super().close()


def _arrived(used: set[nn.Parameter], buckets: list[Bucket], parameter: Tensor) -> None:
    assert isinstance(parameter, nn.Parameter)
    if parameter.grad is None:
        return  # torch also calls this when a function has no gradient for it
    used.add(parameter)
    for bucket in buckets:
        if parameter in bucket.views:
            bucket.accumulate(parameter)


@final
class AsyncUpdate(Update):
    """Workers along a group; the process of replica 0 hosts the server beside its worker. `ranks` are the
    world's numbers of this group's. `schedule`: version → factor of the learning rate. `stepper`: how the
    server updates."""

    def __init__(
        self,
        gradients: WorkerGradients,
        share_buffers: Callable[[], None],
        make: Make,
        *,
        ranks: Sequence[int],
        staleness: float,
        clip: float | None = None,
        schedule: Callable[[int], float] | None = None,
        stepper: type[DirectStepper] | type[MasterStepper] = DirectStepper,
        loss_scaling: LossScaling | None = None,
    ) -> None:
        self._gradients, self._share_buffers = gradients, share_buffers
        self._is_stale, self._is_empty = staleness > 0, False
        self.loss_scaling = loss_scaling  # this worker's own
        parameter_set = gradients.parameter_set
        self._group: Group = parameter_set.group
        self._host: Host | None = None
        if self._group.rank == SERVER:
            self._host = Host(
                parameter_set.trained,
                make,
                stepper,
                workers=self._group.size,
                staleness=staleness,
                clip=clip,
                schedule=schedule,
                skips_overflows=loss_scaling is not None,
            )
            self.optimizer = self._host.optimizer
        else:
            trained: list[nn.Parameter] = [parameter for _, parameter in parameter_set.trained]
            self.optimizer = make_local(make_whole(make, trained), {})
        self._learning_rate = LearningRate(self.optimizer, schedule, by_step=False)
        self._step = 0
        self._messages: dist.ProcessGroup | None = None
        self._tally = (0.0, 0.0, 1.0)
        self._port = self._open_port(ranks)
        # When this is garbage, or the process ends, the server must not wait for this worker.
        weakref.finalize(self, self._port.leave).atexit = False
        # At the end the last to register is the first to be called: while the process group is still there.
        atexit.register(_leave_at_exit, weakref.ref(self._port))

    def set_learning_rate(self, step: int) -> None:  # noqa: ARG002 (the server sets that of each version)
        self._learning_rate.check_scheduler()

    def start_step(self) -> None:
        self._port.pull(self._step, self._gradients.weights)
        self._gradients.start_step()
        self._is_empty = False

    def norm(
        self,
        tally: Tensor,
        gates: GateNumbers | None = None,  # noqa: ARG002 (there is one row, and no gate)
        *,
        own: int | None = 0,  # noqa: ARG002
        known: Known | None = None,  # noqa: ARG002
    ) -> None:
        """The server sums: a worker has its own numbers alone."""
        total, count, scaled = HostCopy(
            tally
        ).wait()  # unlike tolist, lets the server's threads use the device
        # The server adds gradients of loss totals: it takes back what the losses were divided by.
        self._tally = total, count, scaled / count if count else 1.0

    def step(self) -> None:
        gradient = Gradient(self._gradients.buckets, self._gradients.used_flags(), *self._tally)
        result = self._port.push(self._step, gradient)
        self._step += 1
        self._is_empty = result.counted == 0
        overflows = self.loss_scaling is not None and not self._is_empty and not math.isfinite(result.norm)
        has_update = not self._is_empty and not overflows
        if (
            self._host is None and has_update
        ):  # the server sets its own; here it is for readers of the optimizer
            self._learning_rate.set(result.version - 1)
        scale = float(self.loss_scale)
        outcome = Outcome(result.total, result.counted, result.norm, scale, float(overflows))
        self.numbers = StepNumbers.known(outcome, of_worker=self._is_stale)
        if self.loss_scaling is not None:
            self.loss_scaling.after_step(overflows=overflows, refused=self._is_empty)

    @property
    def refuses(self) -> bool:
        return self._is_empty

    def publish(self) -> None:
        """The next pull brings the new weights."""

    def synchronize(self) -> None:
        """Wait until every worker is here and bring the newest weights, and replica 0's buffers, to all."""
        self._synchronize()

    def log(self) -> list[Push]:
        """All that led to the weights as they are, the same on every rank; all must call this."""
        return self._port.log(self._synchronize())

    def agree(self, tally: Tensor) -> tuple[float, float]:
        with self._group.ledger.about("metrics"):
            self._group.all_reduce(tally)
        return loss_and_count(*HostCopy(tally).wait())

    def owned(self) -> list[OwnedSlice]:
        if self._host is None:
            return self._owned_scale()
        parameters = self._gradients.parameter_set.parameters
        frozen = [(name, p) for name, p in parameters.items() if not p.requires_grad]
        version = own_counter("version", self._host.server.version, torch.int64)
        weights = [*self._host.owned(), *(OwnedSlice(whole_slice(name, p), p) for name, p in frozen)]
        return [*weights, version, *self._owned_scale()]

    def _owned_scale(self) -> list[OwnedSlice]:
        if self.loss_scaling is None:
            return []
        whose = f"of worker {self._group.rank}"
        counters = self.loss_scaling.counters()
        return [own_counter(f"{name} {whose}", each) for name, each in counters.items()]

    def updated_tensors(self) -> list[tuple[str, nn.Parameter]]:
        return [] if self._host is None else self._host.updated_tensors()

    def load(self, saved: SavedState, in_whole: InWhole, *, state: bool = True) -> None:
        """The server's; a worker pulls its weights before each step."""
        if self._host is not None:
            self._host.load(saved, in_whole, state=state)

    def restore(self, numbers: Mapping[str, float]) -> None:
        workers = self._group.size
        of_each = [numbers_of(numbers, worker, workers) for worker in range(workers)]
        own = of_each[self._group.rank]
        self._step = int(own["begun steps"])
        if self.loss_scaling is not None:
            self.loss_scaling.restore(own)
        if self._host is not None:
            self._host.server.restore(int(own["version"]), [int(each["begun steps"]) for each in of_each])

    def storages(self) -> dict[str, list[Tensor]]:
        worker = self._gradients.storages()
        storages = {"parameters": worker.parameters, "gradients": worker.gradients, "optimizer": []}
        if self._host is not None:
            for category, tensors in self._host.storages().items():
                storages[category] += tensors
        return storages

    def close(self, *, failed: bool = False) -> None:
        self._port.leave()
        self._gradients.close()
        if failed:  # connections end with their workers, whose threads may still use the process group
            return
        if self._host is not None:
            self._host.close()
        if self._messages is not None:
            dist.destroy_process_group(self._messages)
            self._messages = None

    def _open_port(self, ranks: Sequence[int]) -> Port:
        messages = self._messages = open_group(ranks) if self._group.size > 1 else None
        if self._host is None:
            assert messages is not None, "a single worker is the server"
            return RemotePort(messages, self._group.ledger)
        if messages is not None:
            self._host.connect(messages)
        return LocalPort(self._host.server, self._group.ledger)

    def _synchronize(self) -> int:
        version = self._port.synchronize(self._gradients.weights)
        self._share_buffers()
        return version


def _leave_at_exit(reference: weakref.ref[Port]) -> None:
    port = reference()
    if port is not None:
        port.leave()
