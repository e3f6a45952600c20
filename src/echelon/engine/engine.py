"""The engine: one training step, and the state it acts on, whatever the plan.

A step is a program: forwards, backwards and messages of each microbatch, the sum of gradients over replicas,
norm, update, new weights to all. A step runner runs it (step_runner.py); what each instruction means under a
plan is said by the strategies that `parallelize` composes.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
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
from echelon.engine.saving.export import check_pretrained, export
from echelon.engine.saving.restore import is_put_together, is_split, restore_weights
from echelon.engine.setup import Setup
from echelon.engine.step.balance import ExpertLoad, make_balance
from echelon.engine.step.batch_reader import to_plain
from echelon.engine.step.continuous import ContinuousRunner
from echelon.engine.step.metrics import Evaluation, Measure, Metrics, agree_on_means, check_measure
from echelon.engine.step.runner import StepRunner
from echelon.engine.step.step import FlushedRunner, Step
from echelon.engine.step.step_counter import StepCounter
from echelon.engine.watch import Inside, Watch, guard_outside
from echelon.errors import UserError
from echelon.launching import beat
from echelon.memory import Memory, Meter
from echelon.nn.batch import Batch, take_part
from echelon.parallel.observer import StepObserver
from echelon.plan import Plan
from echelon.program import Span
from echelon.state.assembly import Assembly
from echelon.state.checkpoint import RETRIES, Manifest, SavedState, SaveOptions
from echelon.state.ownership import ENGINE, MASTER, VALUE, OwnedSlice, Slice
from echelon.state.weight_files import SHARD_BYTES
from echelon.update.update import Push


def _is_value(box: Slice) -> bool:
    return box.part == VALUE


class Engine:
    """Made by `echelon.parallelize`; the same calls on every rank. `close` it, or use it in a `with`."""

    def __init__(self, setup: Setup, audit: AuditSettings) -> None:
        mesh, local, layers, update = setup.mesh, setup.local, setup.layers, setup.update
        self.module, self.mesh, self._setup = setup.model, mesh, setup
        self._local, self._update, self._wrapping = local, update, setup.wrapping
        self._reader, self._names = setup.reader, setup.names
        flushes = mesh.plan.flushes
        balance = self._balance = make_balance(setup.gates, mesh, local, layers, setup.observers)
        self._runner: StepRunner = (FlushedRunner if flushes else ContinuousRunner)(setup, balance)
        if isinstance(self._runner, FlushedRunner):
            self._runner.first_step.compares_buffers = audit.mode != "off"
        self._meter = Meter(self.module, self._storages, mesh.host_storages)
        setup.observers.add(self._meter, outermost=True)
        if update.units is not None:
            update.units.on_unit = self._meter.sample
        scaling = update.loss_scaling
        self._counter = StepCounter(
            smallest_scale=1.0 if scaling is None else scaling.smallest,
            skips_steps=flushes,
            most_skipped=setup.rule.nonfinite.most_skipped,
        )
        self._state = EngineState(setup, self._counter)
        self._modules = self._state.modules
        inside = Inside()
        guard_outside(self.module, mesh, local, layers, setup.wrapping, setup.observers, inside)
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
        """What this rank moved, by axis, operation and subject."""
        return self.mesh.ledger

    @property
    def replica(self) -> int:
        """Which part of the global batch is this rank's."""
        return self.mesh.position.replica

    @property
    def replicas(self) -> int:
        return self.plan.data

    @property
    def needs_samples(self) -> bool:
        """Whether every replica must have a sample in each step: ranks talk in every microbatch."""
        return self._runner.feed.fixed_count

    @property
    def steps(self) -> int:
        """How many updates were made; on a CUDA device the last two may still turn out to be refused, or
        skipped.

        With a PipeDream schedule: how many steps had a sample that the loss counts.
        """
        return self._counter.updates

    @property
    def skipped_steps(self) -> int:
        """How many steps skipped an update because their loss or gradients were not finite (under fp16, or
        with nonfinite="skip"); on a CUDA device, as far as is known."""
        return self._counter.skipped

    @property
    def audit(self) -> list[AuditResult]:
        """What the last audit has found, one result per entry; empty before the first step."""
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
        optimizer state and no buffer. It keeps its number: the next step has the next rate and dropout. On a
        CUDA device a look at its metrics raises, and so does the second step after it, on every rank; that
        call trains nothing and can be repeated.

        With precision=fp16, a step whose gradients are not finite is skipped: it changes no weight and no
        optimizer state, and `skipped` of its metrics is true. It is no error, and keeps its number too. With
        nonfinite="skip" the same is so in every precision, also where the loss is not finite; then buffers
        stay as they were, too. Many such steps in a row are an error, which names the first layer.

        With a PipeDream schedule a refused step is reported alike, but not undone: it has applied the updates
        of earlier microbatches, and buffers keep what its own have changed.
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
            return self._evaluate(pair, measure)

    def _evaluate(self, pair: Batch, measure: Measure | None) -> Evaluation:
        self.ledger.start_step()
        self._show_newest()
        modes = {module: module.training for module in self._modules}
        self._set_mode(training=False)
        try:
            tally, sums = self._runner.evaluate(pair, measure)
        finally:
            for module, training in modes.items():
                module.training = training
        loss, counted = self._update.agree(tally)
        everyone, device = self.mesh.group("all"), self.mesh.device
        measured = None if measure is None else agree_on_means(sums, everyone, device)
        beat()
        return Evaluation(loss / counted, round(counted), measured)

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
        if to not in (None, "rank0"):
            raise UserError(f"full_state_dict(to={to!r}): give to='rank0', or leave it out for every rank")
        whole = {name: tensor for (name, _), tensor in self._assembled(_is_value, to_first=to is not None)}
        if to is not None and self.mesh.rank != 0:
            return {}
        local = self.module.state_dict(keep_vars=True)
        # Extra state, which nobody owns, is as it is here.
        return {
            name: whole[first] if first in whole else copy.deepcopy(local[name])
            for name, first in self._names.state.items()
            if first in whole or name in local
        }

    def export(self, folder: str | Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        """Write weights and buffers as a Hugging Face folder, which transformers loads if it knows the model.

        All ranks must call this. Rank 0 writes one tensor after the other, and holds in host memory what the
        tensor is made of (query, key and value of GPT-2) beside it. Any other rank holds one at a time.
        """
        with self._watch.own_work():
            export(self.module, self._names, self._assembly(_is_value), folder, self.mesh.rank, shard_bytes)

    def save_pretrained(self, folder: str | Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        """Write a model of transformers as its own save_pretrained does: from_pretrained loads the folder.

        All ranks must call this; see `export`.
        """
        check_pretrained(self.module)
        self.export(folder, shard_bytes=shard_bytes)

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

        `extra` is plain data of the user's (JSON), which `load` returns: the position in the data, say. It
        must be the same on all ranks.

        wait=False returns when the state is copied, and writes while training goes on; an error is raised by
        the next save, or by `finish_saving`. With copy_behind=True the copy, too, is made while
        the next step computes, if steps of the plan update at their end; until it has ended, nothing but that
        step may change weights or the optimizer's state.

        `then` is called on rank 0 when the checkpoint is whole. `retries`: how often a write is tried again
        after an error that may pass, as remote storage has them.
        """
        options = SaveOptions(wait, then, retries)
        self._checkpointing.save(path, extra or {}, options, copy_behind=copy_behind)

    def saved_state(self, extra: Mapping[str, Any]) -> tuple[list[OwnedSlice], Manifest]:
        """What `save` writes: all that this rank owns, and what a manifest says beside. All ranks must call
        this. The tensors are those of the engine, which the next step changes."""
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
        """As `load`, from a checkpoint that is open: one for all ranks, or, of copies in memory, one file for
        each."""
        with self._watch.own_work():
            extra = self._checkpointing.load_saved(saved)
            self._watch.forget()
        return extra

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state of each parameter, whole, under every original name (copies)."""
        whole: dict[str, dict[str, Tensor]] = {}
        for (name, part), tensor in self._assembled(lambda box: box.part not in (VALUE, MASTER)):
            whole.setdefault(name, {})[part] = tensor
        return {name: whole.get(first, {}) for name, first in self._names.parameters.items()}

    def _assembled(
        self, chosen: Callable[[Slice], bool], *, to_first: bool = False
    ) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """What all ranks own of the model, put together, tensor by tensor; `to_first`: in host memory of
        rank 0 alone."""
        assembly = self._assembly(chosen)
        for key in sorted(assembly):
            tensor = assembly.tensor(key, to=0 if to_first else None)
            if tensor is not None:
                yield key, tensor.cpu() if to_first else tensor

    def _assembly(self, chosen: Callable[[Slice], bool]) -> Assembly:
        self._show_newest()
        owned = [each for each in self.owned() if each.slice.name != ENGINE and chosen(each.slice)]
        return Assembly(owned, self.mesh.group("all"), self.mesh.device)

    def log(self) -> list[Push]:
        """Of asynchronous training: which worker's step made which version, the same on every rank."""
        self._check_open()
        return self._update.log()

    @property
    def spans(self) -> list[Span]:
        """When each instruction of the last step was executed on this rank."""
        return self._runner.spans

    def expert_load(self) -> Mapping[str, ExpertLoad]:
        """What the experts of each gate got in the last step, over the global batch, the same on every rank;
        by the name of the gate. Empty without gates, and where workers or microbatches update by themselves.

        Waits for the device when somebody looks into it, as metrics do.
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
        fit, or nobody needs it. So does the default for a model that was deferred.
        """
        if self._is_closed:
            return
        restore = is_put_together(self.module) if restore is None else restore
        weights: dict[str, Tensor] | None = None
        failed = True
        refused: UserError | None = None
        try:
            if not self._runner.is_broken and not self._checkpointing.is_loaded_in_part:
                # Raised at the end: the model is as good as before that step.
                refused = self._step.late_error()
                self.synchronize()
                lost = self._checkpointing.saving_error()
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
        lines = [f"Engine('{self.plan}', rank {self.mesh.rank} of {self.plan.ranks})"]
        for stage in self._local.stages.values():
            entries = self._wrapping.entries(stage.module.modules())
            stack = ", ".join(f"{entry} ×{count}" for entry, count in entries.items()) or "nothing"
            lines += [f"  {stage.describe()}", f"    wrapping, innermost first: {stack}"]
        lines += [f"  audit of {result}" for result in self.audit if result.outcome == "skipped"]
        return "\n".join(lines)

    def _set_mode(self, *, training: bool) -> None:
        self.module.train(training)
        for module in set(self._modules) - set(self.module.modules()):
            module.training = training

    def _storages(self) -> dict[str, list[Tensor]]:
        storages = self._update.storages()
        storages["parameters"] = [*storages["parameters"], *self._runner.storages()]
        storages["buffers"] = [*self.module.buffers(), *self._runner.buffer_copies()]
        return storages
