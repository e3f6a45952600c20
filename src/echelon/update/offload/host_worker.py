"""A thread that updates weights on the host while the device goes on: its jobs, the memory of their
gradients, and its calls of the user's optimizer.

Jobs run one after the other. A job that raises leaves weights between those of before and after an update. So
the jobs behind it do not run, and every wait for one, then or later, raises the error.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from echelon.collectives import HostBoundary
from echelon.errors import UserError
from echelon.update.offload.host_adam import Scratch, update_in_portions
from echelon.update.optim.needs import inner_optimizers
from echelon.update.optim.sum_optimizer import SumOptimizer
from echelon.update.precision.optimizer_call import make_momentum, may_fuse, restricted
from echelon.update.precision.stepper import takes_units


@final
class Ticket:
    """The end of a job: `wait` returns when it is done, or raises if any job has failed."""

    def __init__(self, worker: "HostWorker") -> None:
        self._worker = worker
        self.done = threading.Event()

    def wait(self) -> None:
        self.done.wait()
        self._worker.check()


@final
class HostWorker:
    """Starts its thread with the first job; `close` ends it."""

    def __init__(self, device: torch.device, num_threads: int | None = None) -> None:
        """`num_threads`: of torch's operations in a job; None leaves them as they are."""
        self._device, self._num_threads = device, num_threads
        self._jobs: SimpleQueue[tuple[Callable[[], None], Ticket] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Ticket | None = None
        self._error: BaseException | None = None
        self._is_closed = False
        self._modes: list[TorchDispatchMode] = []  # of the thread of the step, which torch keeps by thread
        self.on_error: Callable[[], None] = lambda: None  # called in the thread of the job
        self.on_raise: Callable[[], None] = lambda: None  # in one that is told of it, any number of times

    def submit(self, job: Callable[[], None]) -> Ticket:
        self.check()
        if self._thread is None:
            self._modes = list(_get_current_dispatch_mode_stack())
            self._thread = threading.Thread(target=self._work, name="echelon-host-update", daemon=True)
            self._thread.start()
        self._last = Ticket(self)
        self._jobs.put((job, self._last))
        return self._last

    def run(self, job: Callable[[], None]) -> Ticket:
        """Run `job` here, after those before it."""
        self.wait()
        ticket = Ticket(self)
        try:
            job()
        except BaseException as error:
            self._fail(error)
            self.on_raise()
            raise
        finally:
            ticket.done.set()
        return ticket

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self.on_error()

    def wait(self) -> None:
        """Return when all jobs are done; raises if one has failed."""
        if self._last is not None:
            self._last.done.wait()
        self.check()

    def wait_from_outside(self) -> None:
        """The same, in any other thread than that of the jobs; an engine that is closed has none."""
        if self._last is not None and threading.current_thread() is not self._thread:
            self._last.done.wait()

    def check(self) -> None:
        """Raise if a job has failed, any number of times."""
        if self._error is not None:
            error = self._error
            self.on_raise()
            raise UserError(
                f"the update of weights on the host (offload=optimizer) has failed with "
                f"{type(error).__name__}: {error}; some weights may be those of after the step, and others "
                "those of before; start again from weights that were saved"
            ) from error
        if self._is_closed:
            raise UserError("this engine is closed, and updates no weights any more")

    def close(self) -> None:
        """End the thread when the jobs that it has are done."""
        self._is_closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        if self._device.type != "cuda":
            with ExitStack() as modes:
                for mode in self._modes:
                    modes.enter_context(mode)
                self._run_all()
            return
        torch.cuda.set_device(self._device)
        # What a job gives the device waits for nothing that the step has given it: it has no order with that.
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            self._run_all()

    @torch.no_grad()
    def _run_all(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, ticket = entry
            try:
                if self._error is None:
                    job()
            except BaseException as error:
                self._fail(error)
            finally:
                ticket.done.set()
            del entry, job, ticket  # hold no memory while there is nothing to do


@final
class HostRing:
    """Host memory for gradients on their way to an update. One thread takes pieces, another gives them back.

        | in use: units 7, 6, 5 | free …                 | in use: units 9, 8 |
                                ↑ the next piece          ↑ the first to be given back

    Updates run in the order in which their gradients came: pieces come back in the order of their taking.
    """

    def __init__(self, boundary: HostBoundary, num_bytes: int) -> None:
        self._memory = boundary.empty(num_bytes, torch.uint8)
        self._taken: deque[tuple[int, int]] = deque()  # (begin, end) of each piece, the oldest first
        self._changed = threading.Condition()
        self._is_abandoned = False

    def take(self, num_bytes: int) -> Tensor:
        """A piece of memory; waits until there is room for it."""
        assert num_bytes <= len(self._memory), (num_bytes, len(self._memory))
        with self._changed:
            # Abandoned: the thread that gives back has failed, and the step would wait forever.
            while (begin := self._find(num_bytes)) is None and not self._is_abandoned:
                self._changed.wait()
            begin = begin or 0
            self._taken.append((begin, begin + num_bytes))
        return self._memory[begin : begin + num_bytes]

    def give_back(self) -> None:
        with self._changed:
            self._taken.popleft()
            self._changed.notify()

    def abandon(self) -> None:
        """No piece is given back or read any more: no thread need wait for one."""
        with self._changed:
            self._is_abandoned = True
            self._changed.notify()

    def storages(self) -> list[Tensor]:
        return [self._memory]

    def _find(self, size: int) -> int | None:
        if not self._taken:
            return 0
        oldest, newest = self._taken[0][0], self._taken[-1][1]
        if newest > oldest:  # what is in use is in one piece: behind it, or before it
            if newest + size <= len(self._memory):
                return newest
            return 0 if size < oldest else None
        return newest if newest + size < oldest else None


_STEP_HOOKS = {"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}


@final
class HostCall:
    """One update of some parameters on the host, with the options of now.

    It works on a copy of the optimizer that shares its state: a learning rate that is set meanwhile is for
    the next update. Where torch has a fused kernel for the CPU, and the user has left open how the optimizer
    works, it uses that: one pass over memory.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._optimizer = _snapshot(optimizer, set(parameters))

    def __call__(self, factor: float) -> None:
        """All parameters have gradients, which are scaled by the factor, and may be changed."""
        for each in inner_optimizers(self._optimizer):
            _update(each, factor)

    def in_portions(
        self, factor: float, gradients: Sequence[Tensor], weights: Sequence[Tensor], scratch: Scratch
    ) -> bool:
        """The same of masters, from which `weights` are rounded. False: nothing has changed."""
        return update_in_portions(self._optimizer, self._parameters, gradients, weights, factor, scratch)


@final
class DirectCall:
    """The same with the optimizer itself, for one that must not be copied: in the thread of the step."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer, self._parameters = optimizer, parameters

    def __call__(self, factor: float) -> None:
        _scale([p.grad for p in self._parameters if p.grad is not None], factor)
        with restricted(self._optimizer, self._parameters):
            self._optimizer.step()

    def in_portions(self, *_: Any) -> bool:
        return False


def runs_beside(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether another thread may update: no hook watches the steps, and ranks do not talk in them."""
    return takes_units(optimizer) and not talks(optimizer)


def talks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ranks add up sums in its steps."""
    sums = [each for each in inner_optimizers(optimizer) if isinstance(each, SumOptimizer)]
    return any(work.exchange.rounds for each in sums for work in each._work)


def _snapshot(optimizer: torch.optim.Optimizer, chosen: Set[nn.Parameter]) -> torch.optim.Optimizer:
    """Another optimizer of this kind over the chosen parameters, which shares the state of this one."""
    copy: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer))
    for name in _STEP_HOOKS & vars(optimizer).keys():  # those added later are for the next update
        setattr(copy, name, vars(optimizer)[name].copy())
    vars(copy).pop("step", None)  # that of a learning-rate scheduler, which calls the original
    copy.param_groups = [_options(group, chosen) for group in optimizer.param_groups]
    if hasattr(optimizer, "optimizers"):
        copy.optimizers = [_snapshot(each, chosen) for each in inner_optimizers(optimizer)]  # type: ignore[attr-defined]
    return copy


def _options(group: dict[str, Any], chosen: Set[nn.Parameter]) -> dict[str, Any]:
    options = {key: _copied(value) for key, value in group.items()}
    options["params"] = [parameter for parameter in group["params"] if parameter in chosen]
    return options


def _copied(value: Any) -> Any:
    """A learning rate may be a tensor, on a device even."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _update(optimizer: torch.optim.Optimizer, factor: float) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not may_fuse(optimizer) or not gradients:
        _scale(gradients, factor)
        optimizer.step()
        return
    for group in optimizer.param_groups:
        group["fused"] = True
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    make_momentum(optimizer, parameters)
    # The kernel reads a float32 scale, which is too coarse for float64 gradients.
    if factor != 1.0 and all(gradient.dtype == torch.float32 for gradient in gradients):
        scale = torch.tensor(1.0 / factor, dtype=torch.float32)
        optimizer.grad_scale, optimizer.found_inf = scale, torch.zeros_like(scale)  # type: ignore[attr-defined]
    else:
        _scale(gradients, factor)
    optimizer.step()


def _scale(gradients: list[Tensor], factor: float) -> None:
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
