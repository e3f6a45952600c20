"""A thread that updates weights on the host while the device goes on: jobs run one after the other.

A job that raises leaves weights between those of before and after an update. So the jobs behind it do not
run, and whoever waits for one, then or later, gets the error.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import final

import torch

from echelon.errors import UserError


@final
class Ticket:
    """Of a job: `wait` returns when it is done, or raises if any job has failed."""

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
        self.on_error: Callable[[], None] = lambda: None  # called in the thread of the job
        self.on_raise: Callable[[], None] = lambda: None  # in one that is told of it, any number of times

    def submit(self, job: Callable[[], None]) -> Ticket:
        """Run `job` after those before it."""
        self.check()
        if self._thread is None:
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
