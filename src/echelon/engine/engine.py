"""The engine: what a training loop calls, the same under every plan.

core.py          its parts, and what it tells of itself
loop_calls.py    steps and evaluations: the work of step/
state_calls.py   whole weights, files, checkpoints: the work of saving/
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from echelon.engine.loop_calls import LoopCalls
from echelon.engine.saving.restore import is_put_together, is_split, restore_weights
from echelon.engine.state_calls import StateCalls
from echelon.engine.step.balance import ExpertLoad
from echelon.engine.trace import DEFAULT_STEPS, Recorder
from echelon.errors import UserError
from echelon.memory import Memory
from echelon.parallel.observer import StepObserver
from echelon.program import Span
from echelon.update.update import Push


class Engine(LoopCalls, StateCalls):
    """Made by `echelon.parallelize`; the same calls on every rank. `close` it, or use it in a `with`."""

    _recorder: Recorder | None = None  # of a trace that is asked for

    def observe(self, observer: StepObserver) -> None:
        """Let an observer of your own see every step from the next one on: docs/architecture.md."""
        self._setup.observers.add(observer)

    def trace(self, path: str | Path, steps: range | None = None) -> None:
        """Write when each instruction and each collective of `steps` ran, on every rank, to a file for
        Perfetto, when the last of them is done; `steps` are counted from 1, and by default the next three.

        All ranks must call this. Steps in the window take as long as others; at its end ranks wait for each
        other once, and the file is written by rank 0.
        """
        self._check_open()
        begun = self._counter.begun
        steps = range(begun + 1, begun + 1 + DEFAULT_STEPS) if steps is None else steps
        if not steps or steps.step != 1 or steps.start <= begun:
            raise UserError(
                f"engine.trace: steps={steps}: must be steps to come, one after the other, and {begun} have "
                f"been made; try steps=range({begun + 1}, {begun + 1 + DEFAULT_STEPS})"
            )
        if self._recorder is not None:
            raise UserError(
                "engine.trace: a trace is being recorded; ask for the next one when it is written"
            )
        program, timer = self._local.program, self._runner.timer
        self._recorder = Recorder(steps, Path(path), self.mesh, timer, program, self._end_trace)
        self._recorder.name_instructions(begun + 1)
        self.observe(self._recorder)

    def _end_trace(self) -> None:
        if self._recorder is not None:
            self._setup.observers.remove(self._recorder)
            self._recorder = None

    def memory(self) -> Memory:
        """Bytes on this rank by category, now and at their peak, on the device and in the host's memory."""
        with self._watch.own_work():
            return self._meter.read()

    @property
    def spans(self) -> list[Span]:
        """When each instruction of the last step was executed on this rank."""
        return self._runner.spans

    def expert_load(self) -> Mapping[str, ExpertLoad]:
        """The load of each gate's experts in the last step, over the global batch, the same on every rank;
        by the name of the gate. Empty without gates, and where workers or microbatches update by themselves.

        Waits for the device when it is read, as metrics do.
        """
        return {} if self._balance is None else self._balance.load()

    def log(self) -> list[Push]:
        """The log of asynchronous training: which worker's step made which version, the same everywhere."""
        self._check_open()
        return self._update.log()

    def close(self, *, restore: bool | None = None) -> None:
        """Release process groups, threads, hooks and shared memory; all ranks must call this.

        Afterwards the model is called as before, and is whole on every rank, so that another engine can take
        it. `restore=False` leaves a model that was split over ranks in its parts: where the whole would not
        fit. So does the default for a model that was deferred.
        """
        if self._is_closed:
            return
        self._watch.check_not_plain()
        restore = is_put_together(self.module) if restore is None else restore
        weights, refused, failed = None, None, True
        try:
            if not self._runner.is_broken and not self._checkpointing.is_loaded_in_part:
                # Raised at the end: the model is as good as before that step.
                refused = self._step.late_error()
                self.synchronize()
                if self._recorder is not None:
                    self._recorder.finish()
                lost = self._checkpointing.saving_error()  # and finish what is being saved
                refused = refused or lost
                weights = self.full_state_dict() if restore and is_split(self.module) else None
                self._runner.close()
            failed = False
        finally:
            self._release(failed=failed)
        if weights is not None:
            restore_weights(self.module, weights, self._names)
        if refused is not None:
            raise refused

    def _release(self, *, failed: bool) -> None:
        """Without a word to other ranks, which may be gone."""
        self._is_closed = True
        self._runner.replicas.close()
        self._watch.close()
        self._own_passes.close()
        self._checkpointing.abandon_saving()  # what is still under way after a failure
        with ExitStack() as stack:  # goes on to the next if one raises
            stack.callback(self.mesh.close, failed=failed)
            stack.callback(self._wrapping.remove)
            stack.callback(self._update.close, failed=failed)
            stack.callback(self._setup.observers.tell, "after_close", failed=failed)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif not self._is_closed:
            self._release(failed=True)

    def __repr__(self) -> str:
        skipped = [f"  audit of {result}" for result in self.audit if result.outcome == "skipped"]
        graphs = getattr(self._runner, "graphs", None)
        recorded = [] if graphs is None else [f"  {graphs.describe()}"]
        return "\n".join([f"Engine({self._setup.describe()}", *recorded, *skipped])
