"""The training loop, as every rank runs it."""

import math
import platform
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast, final

import torch
from torch import nn

from echelon.collectives.agreement import decide_on_rank_0
from echelon.collectives.mesh import this_device
from echelon.engine import Engine, Metrics, parallelize
from echelon.engine.audit import AuditResult, Mode
from echelon.errors import UserError
from echelon.launching import host_work
from echelon.nn.initialization.initial_values import deferred
from echelon.plan import AUTO, Plan
from echelon.train import events
from echelon.train.checkpoints import Checkpoints
from echelon.train.jobs.job import Job
from echelon.train.jobs.machine_fit import refuse_small_device, state_bytes
from echelon.train.runs.rollbacks import LossSpikeError, Rollbacks
from echelon.train.runs.stopping import StopRequest, TimeLimit, limited_job, with_steps
from echelon.train.task import TOKENIZER_FOLDER, Task, open_task
from echelon.update.nonfinite import NonfiniteError
from echelon.update.optim.optimizers import make_optimizer

TRACE = "trace.json"
LARGEST_TO_SAMPLE = 300 * 10**6  # parameters: to write text, one rank holds the whole model


def train_rank(
    job: Job, folder: Path, report: Callable[[events.Event], None], listens: Callable[[], None] = lambda: None
) -> int | None:
    """Train as one rank of the job's plan; rank 0 reports events and writes the model into `folder`.

    Goes on from the newest checkpoint in `folder`, if there is one. Returns None at the end of the training,
    or the last step if ranks were asked to stop before it (SIGTERM). Calls `listens` when that may come.
    """
    with StopRequest.of_ranks() as stop:
        listens()
        return _train(job, folder, report, stop)


def _make_engine(job: Job, rates: "_Rates") -> tuple[Task, Engine]:
    measures = Plan.parse(job.plan).pipeline == AUTO
    with host_work("the data and the model"):
        task = open_task(job)
        refuse_small_device(job, task.config, this_device())
        model: nn.Module
        if not measures:
            model = deferred(task.build)
        else:  # pipeline=auto measures the model with all of its weights
            model = task.build() if job.model.weights is None else task.load(job.model.weights)
    engine = parallelize(
        model,
        job.plan,
        optimizer=partial(make_optimizer, job.optimizer),
        loss=task.loss,
        clip=job.optimizer.clip,
        loss_scale=job.loss_scale,
        schedule=rates,
        seed=job.seed,
        sample_batch=task.training.at(0, (0, 1)) if measures else None,
        weights=None if measures else job.model.weights,
        audit=cast(Mode, job.audit),
        nonfinite=job.engine_nonfinite,
        most_skipped=job.most_skipped,
        average=job.average,
        layers=job.layers,
    )
    return task, engine


def _train(job: Job, folder: Path, report: Callable[[events.Event], None], stop: StopRequest) -> int | None:
    torch.manual_seed(job.seed)
    job = limited_job(job, folder)
    rates = _Rates(job)
    task, engine = _make_engine(job, rates)
    first = engine.mesh.rank == 0
    checkpoints = Checkpoints(job, folder, engine, lambda text: report(events.Noted(text)) if first else None)
    checkpoints.check_room(state_bytes(job, task.config))
    step = checkpoints.load_last()
    if first:
        task.keep_reader(folder / TOKENIZER_FOLDER)
        if step == 0 and events.last_step(folder / events.METRICS):
            report(events.Noted("no checkpoint was whole yet: training begins again at step 1"))
        report(_started(task, engine, checkpoints, step))
    training, limit = _Training(job, engine, task, checkpoints, report), TimeLimit(job)
    _trace(job, engine, folder, step)
    while step < job.steps:
        step += 1
        try:
            if not stop.may_begin(step):
                training.read_all()
                checkpoints.save(step - 1, wait=True)
                engine.close(restore=False)
                return step - 1
            training.step(step)
            fitting = limit.after(step)
            if fitting is not None:
                job = training.limit(fitting, rates)
        except (LossSpikeError, NonfiniteError) as trouble:
            step = training.roll_back(trouble)
    training.tell_last_skipped()
    engine.export(folder / "model")
    if first:
        task.keep_reader(folder / "model")
    if job.average is not None:
        engine.export(folder / "model-averaged", averaged=True)
        if first:
            task.keep_reader(folder / "model-averaged")
    checkpoints.finish()
    engine.close(restore=False)
    if first and task.num_parameters <= LARGEST_TO_SAMPLE:
        with host_work("the sample"):
            report(events.Sampled(task.sample(folder / "model")))
    return None


def _trace(job: Job, engine: Engine, folder: Path, step: int) -> None:
    """Record the steps of `trace` that are to come, unless an earlier part of the run has recorded some."""
    steps, path = job.trace_steps, folder / TRACE
    to_come = range(max(steps.start, step + 1), steps.stop)
    if to_come and (to_come == steps or not decide_on_rank_0(path.exists)):
        engine.trace(path, to_come)


@final
class _Training:
    """The steps of a training on one rank, and what rank 0 tells of them."""

    def __init__(
        self,
        job: Job,
        engine: Engine,
        task: Task,
        checkpoints: Checkpoints,
        report: Callable[[events.Event], None],
    ) -> None:
        self._job, self._engine, self._task, self._checkpoints = job, engine, task, checkpoints
        self._first, self._report = engine.mesh.rank == 0, report
        self._part = (engine.replica, engine.replicas)
        self._rollbacks = Rollbacks(job, checkpoints)
        self._unread: deque[_Unread] = deque()
        self._audit: list[AuditResult] = []
        self._num_made = 0  # steps, by this process
        self._num_skipped = 0  # the last steps in a row
        # Where reading a loss may lead back, all ranks read it after the same step.
        self._reads_early = not checkpoints.spikes.is_on or engine.mesh.device.type == "cpu"

    def step(self, step: int) -> None:
        """Train `step`; read its numbers, or those of the one before, whose loss may be a LossSpikeError."""
        engine, task, job = self._engine, self._task, self._job
        metrics = engine.step(task.training.at(self._checkpoints.batch_of(step), self._part))
        self._num_made += 1
        if self._num_made == events.MEASURED_STEP or (
            self._num_made < events.MEASURED_STEP and step == job.steps
        ):
            measured = events.measure_ranks(engine, step, self._num_made)
            if self._first:
                self._report(measured)
        if self._first and engine.audit != self._audit:
            self._audit = engine.audit
            self._report(events.Audited(tuple(self._audit)))
        report = report_of(engine, step, metrics) if self._first else None
        self._unread.append(_Unread(step, metrics, report))
        # Reading a step that is not done would leave a GPU idle until the next one is begun.
        if _due(step, job) or self._checkpoints.is_due(step) or (self._reads_early and metrics.is_ready):
            self.read_all()
        elif len(self._unread) > 1:
            self._read(self._unread.popleft())
        if task.num_validation_batches and _due(step, job):
            loss, accuracy = evaluate(engine, task)
            if self._first:
                self._tell(events.Evaluated(step, loss, accuracy))
            refuse_divergence(job, step, validation_loss=loss)
        if self._checkpoints.is_due(step):
            self._checkpoints.save(step)
            if self._first:
                self._report(events.Saved(step))

    def limit(self, steps: int, rates: "_Rates") -> Job:
        before, job = self._job, with_steps(self._job, steps)
        self._job = rates.job = job
        self._checkpoints.limit(job)
        if self._first and before.minutes is not None:
            self._report(events.Limited(steps, before.steps, before.minutes, job.warmup))
        return job

    def read_all(self) -> None:
        while self._unread:
            self._read(self._unread.popleft())

    def _read(self, unread: "_Unread") -> None:
        """Report a step on rank 0, and judge its loss; end the training if it diverged. Waits for it."""
        step, metrics, report = unread
        if report is not None:
            self._tell(report())
        self._num_skipped = self._num_skipped + 1 if metrics.skipped else 0
        if not metrics.skipped:  # which is counted, and may be an error
            trouble = self._checkpoints.spikes.judge(step, metrics.loss)
            if trouble is not None:
                raise LossSpikeError(trouble)
            refuse_divergence(self._job, step, loss=metrics.loss, gradient_norm=metrics.grad_norm)

    def _tell(self, event: events.Stepped | events.Evaluated) -> None:
        self._checkpoints.unwritten.add(event)
        self._report(event)

    def tell_last_skipped(self) -> None:
        """Report a training that ends with skipped steps that were too few to be an error."""
        count = self._num_skipped
        if count and self._first:
            which = "the last step was" if count == 1 else f"the last {count} steps were"
            self._report(events.Noted(f"{which} skipped: the loss or the gradients were not finite"))

    def roll_back(self, error: LossSpikeError | NonfiniteError) -> int:
        """Go on from a checkpoint, without the batches that led here: returns its step, or raises."""
        self._unread.clear()
        event = self._rollbacks.after(error)
        if self._first:
            self._report(event)
        return event.step


def _started(task: Task, engine: Engine, checkpoints: Checkpoints, step: int) -> events.Started:
    device = engine.mesh.device
    is_cuda = device.type == "cuda"
    return events.Started(
        parameters=task.num_parameters,
        train_tokens=task.data_size,
        corpus=task.data_name,
        device=torch.cuda.get_device_name(device) if is_cuda else platform.processor() or platform.machine(),
        unit=task.unit,
        after_step=step,
        lines=checkpoints.unwritten.lines,
        rollbacks=checkpoints.rollbacks,
        source=checkpoints.source,
    )


@final
class _Rates:
    """The schedule of the learning rate of a job, which may get another number of steps. If every push makes
    a version, `data` versions count as one step."""

    def __init__(self, job: Job) -> None:
        self.job = job
        plan = Plan.parse(job.plan)
        self._versions = plan.data if plan.sync == "async" and plan.staleness > 0 else 1

    @property
    def job(self) -> Job:
        return self._job

    @job.setter
    def job(self, job: Job) -> None:
        self._job, self._schedule = job, job.schedule()

    def __call__(self, version: int) -> float:
        return self._schedule(version // self._versions)


def evaluate(engine: Engine, task: Task) -> tuple[float, float | None]:
    """The mean loss over the batches to validate on, the same ones each time, and of what is measured."""
    part = (engine.replica, engine.replicas)
    assert task.validation is not None
    batches = (task.validation.at(index, part) for index in range(task.num_validation_batches))
    results = [engine.evaluate(batch, task.measure) for batch in batches]
    counted = sum(result.tokens for result in results)
    measured = [result.measured * result.tokens for result in results if isinstance(result.measured, float)]
    loss = sum(result.loss * result.tokens for result in results) / counted
    return loss, sum(measured) / counted if measured else None


def _due(step: int, job: Job) -> bool:
    return step == job.steps or (job.evaluate_every > 0 and step % job.evaluate_every == 0)


class _Unread(NamedTuple):
    """A step whose numbers are not read yet. On rank 0 `report` makes its event, and waits for the step."""

    step: int
    metrics: Metrics
    report: Callable[[], events.Stepped] | None


def report_of(engine: Engine, step: int, metrics: Metrics) -> Callable[[], events.Stepped]:
    """Note what the engine says of the step that was queued last, which the next one overwrites."""
    learning_rate, memory_bytes = engine.learning_rate, engine.memory().peak_total
    moves, expert_load = engine.ledger.step_moves(), engine.expert_load()
    return lambda: events.Stepped(
        step=step,
        loss=metrics.loss,
        grad_norm=metrics.grad_norm,
        learning_rate=learning_rate,
        tokens=metrics.tokens,
        seconds=metrics.seconds,
        moved_bytes=moves.sent,
        comm_seconds=moves.busy(),
        comm_hidden_seconds=moves.hidden(),
        memory_bytes=memory_bytes,
        skipped=metrics.skipped,
        loss_scale=metrics.loss_scale,
        experts=tuple(
            events.GateLoad(gate, load.tokens, sum(load.dropped), load.entropy)
            for gate, load in expert_load.items()
        ),
    )


def refuse_divergence(job: Job, step: int, **numbers: float) -> None:
    """Raise a UserError where one of `numbers` (loss=…, gradient_norm=…) of `step` is not finite."""
    clip, rate = job.optimizer.clip, job.optimizer.learning_rate
    clip_fix = "set optimizer.clip=1.0" if clip is None else f"lower optimizer.clip (now {clip})"
    for name, value in numbers.items():
        if not math.isfinite(value):
            became = "NaN" if math.isnan(value) else "infinite"
            raise UserError(
                f"the {name.replace('_', ' ')} became {became} at step {step}; lower optimizer.learning_rate "
                f"(now {rate}), or {clip_fix}, or raise optimizer.warmup (now {job.warmup} steps)"
            )
