"""The engine: what a training loop calls, the same under every plan.

core.py has its parts, and its calls about whole weights, files and checkpoints.
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from echelon.collectives.agreement import gather_values
from echelon.engine.core import EngineCore
from echelon.engine.outputs import Collect, Observed, PassResult, no_loss, whole_output
from echelon.engine.saving.restore import is_put_together, is_split, restore_weights
from echelon.engine.step.balance import ExpertLoad
from echelon.engine.step.batch_reader import to_plain
from echelon.engine.step.metrics import Evaluation, Measure, Metrics, check_measure
from echelon.engine.trace import DEFAULT_STEPS, Recorder
from echelon.errors import UserError
from echelon.launching import beat
from echelon.memory import Memory
from echelon.nn.batch import take_part
from echelon.nn.losses import Loss, Sum
from echelon.parallel.observer import StepObserver
from echelon.program import Span
from echelon.update.update import Push


class Engine(EngineCore):
    """Made by `echelon.parallelize`; all ranks must make the same calls, in the same order. `close` it, or
    use it in a `with`."""

    _recorder: Recorder | None = None  # of a trace that is asked for

    def local(self, batch: Any) -> Any:
        """This replica's part of a global batch."""
        return take_part(to_plain(batch), self.replica, self.replicas)

    def step(self, batch: Any, measure: Measure | None = None) -> Metrics:
        """Train on this replica's part of the batch. Replicas may hold different numbers of samples.

        `batch` is (inputs, targets), (a, b, targets), or a dict of the arguments of the model's forward with
        the targets as "labels": docs/data.md.

        A step that must be refused (no sample that the loss counts) raises, and changes no weight, no
        optimizer state and no buffer; it keeps its number. On a CUDA device a look at its metrics raises, and
        so does the second step after it, on every rank; that call trains nothing and can be repeated.

        A step whose gradients are not finite is skipped under fp16, and in every precision with
        nonfinite="skip": `skipped` of its metrics is true. Many in a row are an error. See docs/a-step.md.

        `measure(output, targets)`, as in `evaluate`, is computed from the same forward passes; `measured` of
        the metrics has its mean over the global batch. It waits for the device.
        """
        self._check_open()
        self._check_hidden()
        self._step.check_closed("engine.step(batch)")
        if measure is None:
            return self._step.train(batch)
        observed = self._observed(measure, None, trains=True)
        with self._using(observed), observed.by(self._setup.observers):
            metrics = self._step.train(batch)
        metrics.measured = observed.measured()
        return metrics

    # A loop of your own: docs/loops.md.

    def forward_backward(
        self,
        batch: Any,
        loss: Loss | None = None,
        *,
        measure: Measure | None = None,
        collect: Collect | None = None,
        last: bool = False,
    ) -> PassResult:
        """Take this replica's part of a batch forward and back. Gradients add up until `update`.

        `loss` is that of this call, if not the engine's own. The result has the mean loss over the global
        batch; `measured`, as `evaluate` does; and in `outputs` what `collect(output, targets)` makes of each
        microbatch, put together for all samples of this replica, on all of its ranks. `last=True`: no other
        call follows before `update`, so that sums over ranks begin behind the backward pass.
        """
        self._check_open()
        self._check_hidden()
        observed = self._observed(measure, collect, trains=True)
        tally = self._step.forward_backward(batch, loss, observed, last=last)
        with self._step.discarded_if_failed():
            return observed.result(tally)

    def update(self) -> Metrics:
        """Sum the gradients over ranks, clip, update the weights and bring them to all ranks."""
        self._check_open()
        self._check_hidden()
        return self._step.update()

    def zero_grad(self) -> None:
        """Drop the gradients that wait for an update; all ranks must call this."""
        self._step.discard()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model on this replica's samples, under plans without stages; `backward` follows."""
        self._check_open()
        if torch.is_grad_enabled():
            self._check_hidden()
        return self._own_passes.forward(args, kwargs)

    def backward(
        self, loss: Tensor | Sum, *others: "Engine", count: float | None = None, retain_graph: bool = False
    ) -> None:
        """Add the gradients of a loss of what this engine, and others, have returned.

        `loss` is a mean over this replica's samples, of which there are `count`: if not given, as many as the
        last call of this engine had. The gradient is that of the mean over all replicas. echelon.Sum(total)
        is summed over them. Only this engine and `others` get gradients.
        """
        self._check_open()
        self._check_hidden()
        own = [each._own_passes for each in others]
        count = None if count is None else _count("engine.backward", count)
        self._own_passes.backward(loss, count, own, retain_graph=retain_graph)

    @torch.no_grad()
    def forward(self, batch: Any, collect: Collect | None = None) -> Any:
        """The outputs of the model for this replica's part of a batch, with the newest weights, in the mode
        (train or eval) that the model has, without gradients; on all ranks of the replica.

        `collect(output, targets)` chooses what to hand back of each microbatch.
        """
        observed = self._observed(None, collect or whole_output)
        self._look(batch, observed, no_loss, nullcontext())
        return observed.outputs()

    @torch.no_grad()
    def predict(self, batch: Any, collect: Collect | None = None) -> Any:
        """The outputs of the model for the whole global batch, in the order of its samples, on every rank: of
        each replica's part, with the newest weights, in evaluation mode, without gradients.

        `collect(output, targets)` chooses what to hand back of each microbatch.
        """
        observed = self._observed(None, collect or whole_output)
        self._look(batch, observed, no_loss, self._runner.evaluation_mode(self._state.modules))
        return observed.outputs(of_all=True)

    @torch.no_grad()
    def evaluate(self, batch: Any, measure: Measure | None = None) -> Evaluation:
        """The mean loss over the global batch with the newest weights, without training.

        `measure(output, targets)` is computed from the same forward, of each microbatch. It returns a mean
        over its samples, or (total, count), or a dict of these by name; `measured` of the result is the mean
        over the global batch, or means by name, the same under every plan. All ranks must give one, or none.
        """
        observed = self._observed(measure, None)
        mode = self._runner.evaluation_mode(self._state.modules)
        loss, counted = self._update.agree(self._look(batch, observed, None, mode))
        return Evaluation(loss / counted, round(counted), observed.measured())

    def _look(
        self, batch: Any, observed: Observed, loss: Loss | None, mode: AbstractContextManager[None]
    ) -> Tensor:
        """Take a batch forward with the newest weights; returns the tally of its losses on this rank."""
        self._check_open()
        pair = self._reader.for_loss(loss).read(batch)
        with self._watch.own_work(), self._using(observed, loss), observed.by(self._setup.observers):
            self.ledger.start_step()
            self._show_newest()
            with mode:
                tally = self._runner.forward(pair)
            beat()
            return tally

    def _observed(
        self, measure: Measure | None, collect: Collect | None, *, trains: bool = False
    ) -> Observed:
        check_measure(measure, self.plan, trains=trains)
        return Observed(self.mesh, self._local.program, measure, collect)

    def _using(self, observed: Observed, loss: Loss | None = None) -> AbstractContextManager[None]:
        return self._setup.layers.using(loss, whole_logits=observed.sees_output)

    # What one rank prints, and what all measure together.

    @property
    def main(self) -> bool:
        """True on rank 0: the one that prints, logs and writes what all have alike."""
        return self.mesh.rank == 0

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0 alone, at once; the options are those of Python's print."""
        if self.main:
            print(*values, **{"flush": True, **options})

    def average(self, value: float | Tensor, count: float | Tensor = 1) -> float:
        """Return the mean of a number that each replica has, weighted by `count`, the same on every rank.

        Ranks of one replica (tensor, pipeline, context) pass the same number. NaN if nothing was counted.
        """
        self._check_open()
        own = [_number("engine.average: value", value), _count("engine.average", count)]
        rows = gather_values(own, self.mesh.group("all"), self.mesh.device)
        replicas = {self.mesh.layout.position(rank).replica: row for rank, row in enumerate(rows)}
        total = sum(number * weight for number, weight in replicas.values() if weight)
        weights = sum(weight for _, weight in replicas.values())
        return total / weights if weights else float("nan")

    # What it has measured, and its end.

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
        self._checkpointing.saver.abandon()  # what is still under way after a failure
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


def _number(name: str, value: object) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach())
    if isinstance(value, Real):
        return float(value)
    raise UserError(f"{name} must be one number, got {type(value).__name__} {value!r}")


def _count(call: str, value: object) -> float:
    count = _number(f"{call}: count", value)
    if not 0 <= count < math.inf:
        raise UserError(f"{call}: count must be a number of samples, at least 0, got {count}")
    return count
