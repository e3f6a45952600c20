"""offload=optimizer (ZeRO-Offload): masters and optimizer state in host memory, and the update there.

    device   | … backward of unit 2 | unit 1 | unit 0 |          forward: unit 0 | unit 1 | unit 2 …
    down                            | grad 2 | grad 1 | grad 0 |
    host                                     | update 2 | update 1 | update 0 |
    up                                                  | weights 2 | weights 1 | weights 0 |

A thread updates one job after the other: a unit, or all units in turn. New weights are waited for when they
are first used (`wait`). At most two units' gradients are on their way down beyond what a plan keeps anyway.

With `delay`, weights of update t stay on the host until the backward passes of step t + 1 are over: the
device computes step t + 1 with the weights of before, while the host updates.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from echelon.collectives import Copy, HostBoundary
from echelon.collectives.buffer_layout import ALIGNMENT, round_up
from echelon.errors import UserError
from echelon.parallel.data.buckets import gradient_dtype
from echelon.state.checkpoint.saved import SavedParameter
from echelon.state.ownership import MASTER, LocalParameter
from echelon.update.numbers import Flag, HostCopy, Number
from echelon.update.offload.host_twins import HostTwins, Twin
from echelon.update.offload.host_worker import DirectCall, HostCall, HostRing, HostWorker, runs_beside
from echelon.update.offload.weight_return import KeptWeights, WeightReturn
from echelon.update.optim.local import FirstStates
from echelon.update.optim.optimizer_state import load_state
from echelon.update.precision.flat_memory import dense_strides
from echelon.update.precision.optimizer_call import may_fuse, on_device
from echelon.update.precision.stepper import LocalStepper, state_tensors

_IN_FLIGHT = 2  # units whose gradients are on their way down


@final
class HostStepper(LocalStepper):
    """The optimizer works on the twins of local parameters, in host memory."""

    on_host = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[Sequence[LocalParameter]],
        twins: HostTwins,
        boundary: HostBoundary,
        worker: HostWorker,
        *,
        delay: bool = False,
        in_backward: bool = False,
    ) -> None:
        """`units`: all local parameters, in the order in which a forward pass uses them. `in_backward`: they
        are updated one after the other in the backward pass."""
        self._units, self._twins, self._boundary, self._worker = units, twins, boundary, worker
        super().__init__(optimizer, [each for unit in units for each in unit])
        self._delay, self._in_backward = delay, in_backward
        self._number = 0
        self._ring: HostRing | None = None
        self._stores: deque[list[Copy]] = deque()
        self._is_late = False  # whether an update is kept on the host
        self._is_shown = False  # whether it has come up for a reader
        self.weights = WeightReturn(boundary)
        self._before = KeptWeights(twins, boundary)
        self.on_failure: Callable[[], None] = lambda: None  # no weight may be read any more
        worker.on_error, worker.on_raise = self._abandon_ring, lambda: self.on_failure()
        self._watch_state_dicts()
        boundary.account("parameters", twins.parameter_storages)
        boundary.account("gradients", lambda: [] if self._ring is None else self._ring.storages())
        boundary.account("optimizer", self._state_storages)

    def updated(self, local: LocalParameter) -> nn.Parameter:
        return self._twins.of(local).updated

    # A step.

    def start_step(self) -> None:
        """Before the gradients of the last step are overwritten."""
        self._worker.check()
        self._finish_stores(0)

    def undo_finish(self) -> bool:
        was_shown, self._is_shown = self._is_shown, False
        if was_shown:
            self.weights.delay_again(self._before.put_back())
            self._is_late = True
        return was_shown

    def start_update(self, number: int) -> None:
        self._number = number

    def check_gradients(self, unit: Sequence[LocalParameter]) -> None:
        for each in unit:
            _check_dense(each)
        super().check_gradients(unit)

    def step(self, factor: Number, skip: Flag = False, unit: Sequence[LocalParameter] | None = None) -> None:
        self._worker.check()
        if not self._twins.has_memory:
            self._allocate()
        # Asked in each step: a hook that the user has added since expects the thread of the step.
        beside = runs_beside(self.optimizer)
        units = [unit] if unit is not None else self._units if beside else [self._local]
        with_gradients = [[each for each in part if each.tensor.grad is not None] for part in units]
        for each in (each for part in with_gradients for each in part):
            _check_dense(each)
        if self._delay:
            # The backward passes of this step are over: no pass needs the older weights any more.
            self._send_delayed()
            self._is_late = True
        numbers = HostCopy(_on_one_device(factor, skip))
        # A rank that has nothing to update counts the update all the same.
        for part in [part for part in with_gradients if part or not beside] or [[]]:
            self._update(part, numbers, beside=beside)
        if "step" in vars(self.optimizer):  # a scheduler of torch asks whether there was an update
            self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _update(self, local: Sequence[LocalParameter], numbers: HostCopy, *, beside: bool) -> None:
        """Send gradients down, and let the worker do the rest; or do it here."""
        twins = [self._twins.of(each) for each in local]
        new = [twin for twin in twins if self.weights.is_changed(twin)]
        loads = [self._boundary.store(twin.weights, twin.local.tensor.detach()) for twin in new]
        ring = self._ring
        assert ring is not None
        gradients, stores = self._send_gradients(local, ring)
        updated = [twin.updated for twin in twins]
        # Made here, not in the job: it takes the options of now, which a scheduler may change before the job.
        call = HostCall(self.optimizer, updated) if beside else DirectCall(self.optimizer, updated)
        returning = self.weights.expect(twins, announce=not self._delay)
        number = self._number

        def job() -> None:
            try:
                # `join` lets this thread wait until host memory is written, or is not read any more; `wait`,
                # in the thread of the step, lets the device's stream wait.
                for copy in (*loads, *stores, *returning.earlier):
                    copy.join()
                for twin in twins:
                    if twin.host_run is not None:
                        twin.host_run.join()
                self._twins.follow(new)
                factor, skip = numbers.wait()
                if not skip:
                    in_portions = partial(call.in_portions, factor)
                    self._twins.update(twins, gradients, lambda: call(factor), number, in_portions)
            finally:  # also after an error: the thread of the step may wait for room in the ring
                ring.give_back()
            returning.send()

        returning.ticket = self._worker.submit(job) if beside else self._worker.run(job)
        self._stores.append([*loads, *stores])
        self._finish_stores(_IN_FLIGHT)

    def _send_gradients(
        self, local: Sequence[LocalParameter], ring: HostRing
    ) -> tuple[list[Tensor], list[Copy]]:
        found = [each.tensor.grad.detach() for each in local if each.tensor.grad is not None]
        sizes = [round_up(gradient.nbytes, ALIGNMENT) for gradient in found]
        pieces = ring.take(max(sum(sizes), ALIGNMENT))[: sum(sizes)].split(sizes)
        gradients = [
            piece.view(gradient.dtype)[: gradient.numel()].as_strided(
                twin.weights.shape, twin.weights.stride()
            )
            for piece, gradient, twin in zip(pieces, found, map(self._twins.of, local), strict=True)
        ]
        stores = [self._boundary.store(host, own) for host, own in zip(gradients, found, strict=True)]
        return gradients, stores

    def _finish_stores(self, at_most: int) -> None:
        """Let the device wait until the gradients of `at_most` units are on their way."""
        # A copy keeps its gradient's memory until this wait: without it the allocator could give that memory
        # to the next layer while the copy still reads it.
        while len(self._stores) > at_most:
            for copy in self._stores.popleft():
                copy.wait()

    def after_updates(self, work: Callable[[Flag], None], skip: Flag) -> None:
        if not self._twins.has_memory:  # the step was left out
            return
        # What the user has changed by hand, and this update has not reached.
        new = [twin for twin in self._twins.all if self.weights.is_changed(twin)]
        loads = [self._boundary.store(twin.weights, twin.local.tensor.detach()) for twin in new]
        self.weights.record_versions(new)
        numbers = HostCopy(_on_one_device(0.0, skip))

        def job() -> None:
            for copy in loads:
                copy.join()
            self._twins.follow(new)
            work(bool(numbers.wait()[1]))

        self._worker.submit(job)
        self._stores.append(loads)

    def newest(self, local: LocalParameter) -> Tensor:
        return self._twins.newest(local)

    def check(self) -> None:
        """Raise if an update has failed: some weights are new, and others old."""
        self._worker.check()

    def _abandon_ring(self) -> None:
        if self._ring is not None:
            self._ring.abandon()

    def _allocate(self) -> None:
        """Before the first update: twins get memory, and the values of all weights."""
        self._twins.allocate()
        self._take_weights(self._twins.all)
        self._ring = HostRing(self._boundary, self._ring_bytes())

    def _take_weights(self, twins: Sequence[Twin]) -> None:
        """Twins get the values of weights that no update has made."""
        copies = [
            self._boundary.store(twin.weights, twin.local.tensor.detach())
            for twin in twins
            if twin.host_run is None
        ]
        for copy in copies:
            copy.wait()
            copy.join()
        for twin in twins:
            if twin.host_run is not None:
                twin.host_run.join()
        with torch.no_grad():
            self._twins.load(twins)
        self.weights.record_versions(twins)

    def _ring_bytes(self) -> int:
        """All gradients, or in a backward pass a quarter of them: the worker may be that far behind."""
        sizes = [sum(_gradient_bytes(each) for each in unit) for unit in self._units]
        total, largest = sum(sizes), max(sizes, default=0)
        some = max(total // 4, min(total, 2 * largest)) if self._in_backward else total
        return some + ALIGNMENT * (1 + len(sizes))

    # Weights.

    def wait(self, local: Sequence[LocalParameter]) -> None:
        """Return when the weights that are on their way to these local parameters are there."""
        if self._worker.has_failed:
            self._worker.check()
        self.weights.wait([each.tensor for each in local])

    @property
    def loses_change(self) -> bool:  # type: ignore[override]
        return bool(self.weights.changed_twins()) or self._before.is_changed()

    def changed(self) -> list[LocalParameter]:
        return [twin.local for twin in self._twins.all if self.weights.is_changed(twin)]

    def end_rehearsal(self, changed: Sequence[LocalParameter]) -> None:
        tensors = {each.tensor for each in changed}
        twins = [twin for twin in self._twins.all if twin.version is not None]
        self.weights.record_versions(twin for twin in twins if twin.local.tensor not in tensors)

    def take_over(self, local: Sequence[LocalParameter]) -> None:
        for each in local:  # also where the address is what it was again
            self._twins.of(each).forget_version()

    def finish(self, *, temporary: bool = False) -> bool:
        self._worker.wait()
        self._finish_stores(0)
        was_late = self._is_late
        if not temporary:
            self._before.forget()
        elif was_late:
            self._before.keep(self.weights.delayed)
        self._is_shown = temporary and (was_late or self._is_shown)
        if was_late:
            self._send_delayed()
            self._is_late = False
        self.weights.wait_all()
        return was_late

    def _send_delayed(self) -> None:
        """Bring the weights of the update before to the device, which has no more use for older ones."""
        self._worker.wait()
        self.weights.send_delayed()

    # State.

    def state(self, local: LocalParameter) -> dict[str, Tensor]:
        self._worker.wait()
        twin = self._twins.of(local)
        has_master = self._twins.has_masters and self._twins.has_memory
        masters = {MASTER: twin.updated.detach()} if has_master else {}
        return masters | state_tensors(self.optimizer, twin.updated)

    @torch.no_grad()
    def load(self, local: LocalParameter, saved: SavedParameter) -> None:
        self._worker.wait()
        was_updated = bool(saved.state_parts or saved.numbers) or saved.has_finer(local.tensor.dtype)
        if not self._twins.has_memory and was_updated:
            self._allocate()
        if not self._twins.has_memory:
            return  # as before the first update
        twin = self._twins.of(local)
        self._take_weights([twin])
        if self._twins.has_masters:
            saved.fill(saved.finest, twin.updated.detach())
        strides, fused = dense_strides(local.tensor), may_fuse(self.optimizer)
        load_state(self.optimizer, twin.updated, strides, saved, self.whole_parts, fused=fused)

    def storages(self, local: Sequence[LocalParameter]) -> list[Tensor]:  # noqa: ARG002
        return []  # all of it is on the host

    def gradients_in_flight(self) -> list[Tensor]:
        return [copy.tensor for copies in self._stores for copy in copies if copy.tensor is not None]

    def host_bytes(self) -> int:
        """Return the bytes of host memory that this will take: weights, masters, state and gradients."""
        kept = self._before.num_bytes() if self._delay else 0
        return self._twins.num_bytes(self.optimizer) + self._ring_bytes() + kept

    def close(self) -> None:
        """Finish what is under way, if it can be, and end the thread."""
        self._worker.close()
        self._finish_stores(0)
        self._ring = None
        if not self._worker.has_failed:
            self.weights.receive_all()

    def _state_storages(self) -> list[Tensor]:
        # Not `state.values()`, which waits for the update that is under way: the meter may be read meanwhile.
        held = dict.values(self.optimizer.state)
        states = [dict(state) for state in list(held)]
        tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return [*self._twins.master_storages(), *tensors]

    def _watch_state_dicts(self) -> None:
        """Let readers and writers of the optimizer's state wait for the update that is under way."""
        if isinstance(self.optimizer.state, FirstStates):
            self.optimizer.state.before_read = self._worker.wait_from_outside
        for register in ("register_state_dict_pre_hook", "register_load_state_dict_pre_hook"):
            if hasattr(self.optimizer, register):
                getattr(self.optimizer, register)(lambda *_: self._worker.wait())


def _check_dense(local: LocalParameter) -> None:
    if local.tensor.grad is not None and local.tensor.grad.is_sparse:
        raise UserError(
            f"offload=optimizer: {local.name} has a sparse gradient, and the host gets dense ones; set "
            "sparse=False in the embedding, or drop offload=optimizer"
        )


def _gradient_bytes(local: LocalParameter) -> int:
    return round_up(local.tensor.numel() * gradient_dtype(local.tensor).itemsize, ALIGNMENT)


def _on_one_device(factor: Number, skip: Flag) -> Tensor:
    """Return both as one float64 tensor: on the device, if either is there."""
    on_cuda = [each for each in (factor, skip) if isinstance(each, Tensor) and each.is_cuda]
    if not on_cuda:
        return torch.tensor([float(factor), float(skip)], dtype=torch.float64)
    return torch.stack([on_device(each, on_cuda).detach().reshape(()) for each in (factor, skip)])
