"""The engine: what a training loop calls, the same under every plan. Each call is the work of another file:
a step (step/step.py), checkpoints (saving/), what users change by hand between steps (watch/).
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from echelon.collectives import Ledger
from echelon.engine.audit import AuditResult
from echelon.engine.audit.auditing import AuditSettings, make_audit
from echelon.engine.audit.drift import make_drift_check
from echelon.engine.audit.nonfinite_search import NonfiniteSearch
from echelon.engine.saving.checkpointing import Checkpointing
from echelon.engine.saving.engine_state import EngineState
from echelon.engine.saving.export import export, save_pretrained
from echelon.engine.saving.restore import is_put_together, is_split, restore_weights
from echelon.engine.saving.whole_tensors import WholeTensors
from echelon.engine.setup import Setup
from echelon.engine.step.balance import ExpertLoad, make_balance
from echelon.engine.step.batch_reader import to_plain
from echelon.engine.step.continuous import ContinuousRunner
from echelon.engine.step.metrics import Evaluation, Measure, Metrics, check_measure
from echelon.engine.step.runner import StepRunner
from echelon.engine.step.step import FlushedRunner, Step
from echelon.engine.step.step_counter import StepCounter
from echelon.engine.watch import Inside, Watch, guard_outside
from echelon.errors import UserError
from echelon.launching import beat
from echelon.memory import Memory, Meter
from echelon.nn.batch import take_part
from echelon.parallel.observer import StepObserver
from echelon.plan import Plan
from echelon.program import Span
from echelon.state.checkpoint import RETRIES, Manifest, SavedState, SaveOptions
from echelon.state.ownership import OwnedSlice
from echelon.state.weight_files import SHARD_BYTES
from echelon.update.update import Push


class Engine:
    """Made by `echelon.parallelize`; the same calls on every rank. `close` it, or use it in a `with`."""

    def __init__(self, setup: Setup, audit: AuditSettings) -> None:
        mesh, local, layers, update = setup.mesh, setup.local, setup.layers, setup.update
        self.module, self.mesh, self._setup = setup.model, mesh, setup
        self._local, self._update, self._wrapping = local, update, setup.wrapping
        self._reader, self._names = setup.reader, setup.names
        inside, flushes = Inside(), mesh.plan.flushes
        guard_outside(self.module, mesh, local, layers, setup.wrapping, setup.observers, inside)
        balance = self._balance = make_balance(setup.gates, mesh, local, layers, setup.observers)
        self._runner: StepRunner = (FlushedRunner if flushes else ContinuousRunner)(setup, balance)
        if isinstance(self._runner, FlushedRunner):
            self._runner.first_step.compares_buffers = audit.mode != "off"
        self._meter = Meter(self.module, partial(_storages, setup, self._runner), mesh.host_storages)
        setup.observers.add(self._meter, outermost=True)
        if update.units is not None:
            update.units.on_unit = self._meter.sample
        self._counter = StepCounter.of(update.loss_scaling, setup.rule.nonfinite, flushes=flushes)
        self._state = EngineState(setup, self._counter)
        self._whole = WholeTensors(self._state, self._show_newest, self.owned)
        self._watch = Watch(self.module, mesh, local, layers, update, inside)
        search = None
        if setup.rule.nonfinite.skips and isinstance(self._runner, FlushedRunner):
            search = NonfiniteSearch(self._runner, self._runner.replay, self._state)
        self._step = Step(
            setup,
            self._runner,
            self._counter,
            self._watch,
            make_audit(audit, setup, self._state, self._runner),
            make_drift_check(local, layers, mesh, audit.check_every),
            search,
        )
        self._checkpointing = Checkpointing(self._state, self._runner, self.synchronize)
        self._is_closed = False

    # What a training loop needs.

    @property
    def plan(self) -> Plan:
        return self.mesh.plan

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's, over what this rank updates."""
        return self._update.optimizer

    @optimizer.setter
    def optimizer(self, _: object) -> None:
        raise UserError("engine.optimizer cannot be replaced; give parallelize another optimizer function")

    @property
    def boundaries(self) -> list[int]:
        """The layers before which the stages of the pipeline begin."""
        return self._local.boundaries

    @property
    def ledger(self) -> Ledger:
        """The bytes that this rank moved, by axis, operation and subject."""
        return self.mesh.ledger

    @property
    def replica(self) -> int:
        """The number of this rank's part of the global batch."""
        return self.mesh.position.replica

    @property
    def replicas(self) -> int:
        return self.plan.data

    @property
    def needs_samples(self) -> bool:
        """True if every replica must have a sample in each step: ranks communicate in every microbatch."""
        return self._runner.feed.fixed_count

    @property
    def steps(self) -> int:
        """The number of updates; on a CUDA device the last two may still turn out to be refused, or skipped.

        With a PipeDream schedule: how many steps had a sample that the loss counts.
        """
        return self._counter.updates

    @property
    def skipped_steps(self) -> int:
        """The number of steps that skipped an update, since loss or gradients were not finite (under fp16, or
        with nonfinite="skip"); on a CUDA device, as far as is known."""
        return self._counter.skipped

    @property
    def audit(self) -> list[AuditResult]:
        """The findings of the last audit, one result per entry; empty before the first step."""
        return list(self._step.audit.results)

    @property
    def learning_rate(self) -> float:
        """The rate of the first parameter group at the last step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def local(self, batch: Any) -> Any:
        """This replica's part of a global batch."""
        return take_part(to_plain(batch), self.replica, self.replicas)

    def step(self, batch: Any) -> Metrics:
        """Train on this replica's part of the batch. Replicas may hold different numbers of samples.

        `batch` is (inputs, targets), (a, b, targets), or a dict of the arguments of the model's forward with
        the targets as "labels": docs/data.md.

        A step that must be refused (no sample that the loss counts) raises, and changes no weight, no
        optimizer state and no buffer; it keeps its number. On a CUDA device a look at its metrics raises, and
        so does the second step after it, on every rank; that call trains nothing and can be repeated.

        A step whose gradients are not finite is skipped under fp16, and in every precision with
        nonfinite="skip": `skipped` of its metrics is true. Many in a row are an error. See docs/a-step.md.
        """
        self._check_open()
        return self._step.train(batch)

    def observe(self, observer: StepObserver) -> None:
        """Let an observer of your own see every step from the next one on: docs/architecture.md."""
        self._setup.observers.add(observer)

    @torch.no_grad()
    def evaluate(self, batch: Any, measure: Measure | None = None) -> Evaluation:
        """The mean loss over the global batch with the newest weights, without training.

        `measure(output, targets)` is computed from the same forward, of each microbatch. It returns a mean
        over its samples, or (total, count), or a dict of these by name; `measured` of the result is the mean
        over the global batch, or means by name, the same under every plan. All ranks must give one, or none.
        """
        self._check_open()
        check_measure(measure, self.plan)
        pair = self._reader.read(batch)
        with self._watch.own_work():
            self.ledger.start_step()
            self._show_newest()
            evaluation = self._runner.evaluate(pair, measure, self._state.modules)
            beat()
            return evaluation

    # The state, whole.

    def owned(self) -> list[OwnedSlice]:
        """Everything that this rank needs to go on, as slices of global tensors: weights, float32 masters,
        optimizer state, buffers, and the engine's own counters. Call `synchronize` first."""
        self._step.check_earlier()
        return self._state.owned()

    def synchronize(self) -> None:
        """Bring every rank to the newest weights: all ranks must call this, between steps.

        With delay=1 the next step computes with these, as the first one does. Whatever else reads the newest
        weights (`evaluate`, `full_state_dict`, `export`) changes no training.
        """
        with self._watch.own_work():
            self._finish_steps()
            self._update.synchronize()

    def _show_newest(self) -> None:
        with self._watch.own_work():
            self._finish_steps()
            self._update.show_newest()

    def _finish_steps(self) -> None:
        self._check_open()
        self._step.check_earlier()
        self._runner.drain()

    def full_state_dict(self, *, to: str | None = None) -> dict[str, Tensor]:
        """All weights and buffers, whole, under their original names, on every rank (copies).

        to="rank0" brings them to the host memory of rank 0, one after the other; the other ranks get none.
        """
        return self._whole.state_dict(to)

    def export(self, folder: str | Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        """Write weights and buffers as a Hugging Face folder, which transformers loads if it knows the model.

        All ranks must call this. Rank 0 writes one tensor after the other, and holds in host memory what the
        tensor is made of (query, key and value of GPT-2) beside it. Any other rank holds one at a time.
        """
        with self._watch.own_work():
            export(self.module, self._names, self._whole.weights(), folder, self.mesh.rank, shard_bytes)

    def save_pretrained(
        self, folder: str | Path, *, merged: bool = False, shard_bytes: int = SHARD_BYTES
    ) -> None:
        """Write a model of transformers as its own save_pretrained does: from_pretrained loads the folder. Of
        a model of peft, write its adapters; or (`merged`) the model inside, with the adapters in its weights.

        All ranks must call this; see `export`.
        """
        with self._watch.own_work():
            weights, rank = self._whole.weights(), self.mesh.rank
            save_pretrained(self.module, self._names, weights, folder, rank, shard_bytes, merged=merged)

    # Checkpoints.

    def save(
        self,
        path: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
        copy_behind: bool = False,
        then: Callable[[], None] | None = None,
        retries: int = RETRIES,
    ) -> None:
        """Write all that is needed to go on into a new folder; all ranks must call this, between steps.

        Any plan can load it. The path is a folder on a disk that all ranks share, or a URL that fsspec knows
        (s3://, gs://). A checkpoint that is there already is replaced when the new one is whole.

        `extra` is plain data of yours (JSON), the same on all ranks, which `load` returns.

        wait=False returns when the state is copied, and writes while training goes on; an error is raised by
        the next save, or by `finish_saving`. With copy_behind=True the copy, too, is made while the next step
        computes; until then nothing else may change weights or the optimizer's state.

        `then` is called on rank 0 when the checkpoint is whole. `retries`: how often a write is tried again
        after an error that may pass, as remote storage has them.
        """
        options = SaveOptions(wait, then, retries)
        self._checkpointing.save(path, extra or {}, options, copy_behind=copy_behind)

    def saved_state(self, extra: Mapping[str, Any]) -> tuple[list[OwnedSlice], Manifest]:
        """Return this rank's part of `save`; all must call this. The next step changes these tensors."""
        return self._checkpointing.saved_state(extra)

    def finish_saving(self) -> None:
        """Return when no checkpoint is being written; all ranks must call this. Raises what went wrong."""
        self._checkpointing.finish_saving()

    def load(
        self, path: str | Path, *, optimizer: bool = True, options: bool = True, verify: bool = True
    ) -> dict[str, Any]:
        """Go on from a checkpoint, whatever plan saved it; returns its `extra`. All ranks must call this.

        optimizer=False leaves the optimizer's state out: another optimizer begins with its own. options=False
        keeps the options of its groups (lr, weight_decay, …) as they are here. Every file is hashed before
        anything changes; verify=False is for a checkpoint that just was.

        If anything does not fit, all errors are raised and nothing has changed. An engine whose load fails
        later (a damaged file) trains no more until another one has succeeded.
        """
        with self._watch.own_work():
            extra = self._checkpointing.load(path, optimizer=optimizer, options=options, verify=verify)
            self._watch.forget()
        return extra

    def load_saved(self, saved: SavedState) -> dict[str, Any]:
        """As `load`, from a checkpoint that is open: for all ranks, or of copies in memory, one for each."""
        with self._watch.own_work():
            extra = self._checkpointing.load_saved(saved)
            self._watch.forget()
        return extra

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state of each parameter, whole, under every original name (copies)."""
        return self._whole.optimizer_state()

    def log(self) -> list[Push]:
        """The log of asynchronous training: which worker's step made which version, the same everywhere."""
        self._check_open()
        return self._update.log()

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

    def memory(self) -> Memory:
        """Bytes on this rank by category, now and at their peak, on the device and in the host's memory."""
        with self._watch.own_work():
            return self._meter.read()

    # The end.

    def close(self, *, restore: bool | None = None) -> None:
        """Release process groups, threads, hooks and shared memory; all ranks must call this.

        Afterwards the model is called as before, and is whole on every rank, so that another engine can take
        it. `restore=False` leaves a model that was split over ranks in its parts: where the whole would not
        fit. So does the default for a model that was deferred.
        """
        if self._is_closed:
            return
        restore = is_put_together(self.module) if restore is None else restore
        weights, refused, failed = None, None, True
        try:
            if not self._runner.is_broken and not self._checkpointing.is_loaded_in_part:
                # Raised at the end: the model is as good as before that step.
                refused = self._step.late_error()
                self.synchronize()
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
        self._watch.close()
        self._checkpointing.abandon_saving()  # what is still under way after a failure
        with ExitStack() as stack:  # goes on to the next if one raises
            stack.callback(self.mesh.close, failed=failed)
            stack.callback(self._wrapping.remove)
            stack.callback(self._update.close, failed=failed)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif not self._is_closed:
            self._release(failed=True)

    def _check_open(self) -> None:
        if self._is_closed:
            raise UserError("this engine is closed; make another one with parallelize")
        self._checkpointing.check_loaded()

    def __repr__(self) -> str:
        skipped = [f"  audit of {result}" for result in self.audit if result.outcome == "skipped"]
        return "\n".join([f"Engine({self._setup.describe()}", *skipped])


def _storages(setup: Setup, runner: StepRunner) -> dict[str, list[Tensor]]:
    """List the tensors that hold each category of memory but activations."""
    storages = setup.update.storages()
    storages["parameters"] = [*storages["parameters"], *runner.storages()]
    storages["buffers"] = [*setup.model.buffers(), *runner.buffer_copies()]
    return storages
