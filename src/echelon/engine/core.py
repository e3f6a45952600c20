"""What an engine is made of, what it tells of itself, and its calls about its state: the work of saving/.

The calls that a training loop makes are in engine.py.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echelon.collectives import Ledger
from echelon.engine.audit import AuditResult
from echelon.engine.audit.auditing import AuditSettings, make_audit
from echelon.engine.audit.drift import DriftCheck, find_copies
from echelon.engine.own_loop import OwnLoop, OwnPasses
from echelon.engine.saving.checkpointing import Checkpointing
from echelon.engine.saving.engine_state import EngineState
from echelon.engine.saving.export import export, save_pretrained
from echelon.engine.saving.whole_model import WholeModel, WholeTensors
from echelon.engine.setup import Setup
from echelon.engine.step.balance import make_balance
from echelon.engine.step.continuous import ContinuousRunner
from echelon.engine.step.nonfinite_search import NonfiniteSearch
from echelon.engine.step.runner import StepRunner
from echelon.engine.step.step import FlushedRunner
from echelon.engine.step.step_counter import StepCounter
from echelon.engine.watch.outside import Inside, guard_outside
from echelon.engine.watch.watch import Watch
from echelon.errors import UserError
from echelon.memory import Meter
from echelon.plan import Plan
from echelon.program import Program
from echelon.state.checkpoint.manifest import Manifest
from echelon.state.checkpoint.rank_save import SaveOptions
from echelon.state.checkpoint.saved import SavedState, open_whole
from echelon.state.checkpoint.storage_errors import RETRIES
from echelon.state.ownership import OwnedSlice
from echelon.state.weight_files.weight_folder import SHARD_BYTES


class EngineCore:
    """The parts of an engine, and its state."""

    def __init__(self, setup: Setup, audit: AuditSettings) -> None:
        mesh, local, layers, update = setup.mesh, setup.local, setup.layers, setup.update
        self.module, self.mesh, self._setup = setup.model, mesh, setup
        self._local, self._update, self._wrapping = local, update, setup.wrapping
        self._reader, self._names = setup.reader, setup.names
        inside, flushes = Inside(), mesh.plan.flushes
        guard_outside(
            self.module, mesh, local, layers, setup.wrapping, setup.observers, inside, setup.names.parameters
        )
        balance = self._balance = make_balance(setup.gates, mesh, local, layers, setup.observers)
        self._runner: StepRunner = (FlushedRunner if flushes else ContinuousRunner)(setup, balance)
        self._runner.replicas.open()
        if isinstance(self._runner, FlushedRunner):
            self._runner.first_step.compares_buffers = audit.mode != "off"
            if mesh.plan.graphs != "false" and mesh.device.type == "cuda":
                from echelon.engine.step.graphs.assembly import make_graphs  # a plan without needs none of it

                self._runner.graphs = make_graphs(setup, self._runner)
        self._meter = Meter(self.module, partial(_storages, setup, self._runner), mesh.host_storages)
        setup.observers.add(self._meter, outermost=True)
        self._counter = StepCounter.of(update.loss_scaling, setup.rule.nonfinite, flushes=flushes)
        self._state = EngineState(setup, self._counter)
        self._whole = WholeTensors(self._state, self._show_newest, self.owned)
        self._watch = Watch(self.module, mesh, local, layers, update, inside)
        self._whole_model = WholeModel(audit.form, self._state, self._whole)
        search = None
        if setup.rule.nonfinite.skips and isinstance(self._runner, FlushedRunner):
            search = NonfiniteSearch(self._runner, self._runner.replay, self._state)
        self._step = OwnLoop(
            setup,
            self._runner,
            self._counter,
            self._watch,
            make_audit(audit, setup, self._state, self._runner),
            DriftCheck(find_copies(local, layers.sharded, mesh), mesh, audit.check_every),
            search,
        )
        self._own_passes = OwnPasses(setup, self._step, self._watch)
        self._checkpointing = Checkpointing(self._state, self._runner, self.synchronize)
        self._is_closed = False

    @property
    def plan(self) -> Plan:
        """The plan, with everything that `auto` has chosen."""
        return self.mesh.plan

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's, over what this rank updates."""
        return self._update.optimizer

    @optimizer.setter
    def optimizer(self, _: object) -> None:
        raise UserError("engine.optimizer cannot be replaced; give parallelize another optimizer function")

    @property
    def program(self) -> Program:
        """The instructions of every rank of the pipeline in a step."""
        return self._local.program

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
        """How many parts a global batch has: one for each replica."""
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

    def owned(self) -> list[OwnedSlice]:
        """Everything that this rank needs to go on, as slices of global tensors: weights, float32 masters,
        optimizer state, buffers, and the engine's own counters. Call `synchronize` first."""
        self._step.check_earlier()
        with self._watch.own_work():
            return self._state.owned()

    def synchronize(self) -> None:
        """Bring every rank to the newest weights: all ranks must call this, between steps.

        With delay=1 the next step computes with these, as the first one does. Whatever else reads the newest
        weights (`evaluate`, `full_state_dict`, `export`) changes no training.
        """
        self._check_hidden()
        with self._watch.own_work():
            self._finish_steps("engine.synchronize(), save or load")
            self._update.synchronize()

    def _show_newest(self) -> None:
        if self.plan.delay and self._step.is_open:
            self._step.check_closed("delay=1: the newest weights are not those of the passes so far")
        with self._watch.own_work():
            self._finish_steps()
            self._update.show_newest()

    def _finish_steps(self, call: str | None = None) -> None:
        self._check_open()
        if call is not None:
            self._step.check_closed(call)
        self._step.check_earlier()
        self._runner.drain()

    def _check_open(self) -> None:
        if self._is_closed:
            raise UserError("this engine is closed; make another one with parallelize")
        self._watch.check_not_plain()
        self._checkpointing.check_loaded()
        if self._update.averages is not None:
            self._update.averages.finish_hiding()

    def _check_hidden(self) -> None:
        """Refuse what must not work on averages (`averaged`)."""
        if self._update.averages is not None:
            self._update.averages.check_hidden()

    # Whole weights, files of a model, checkpoints. All ranks must make these calls, between steps.

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the weights are their averages (`average` of parallelize) for all that reads them, as
        `evaluate`; buffers are the newest. Afterwards the weights are what they were, in every bit."""
        averages = self._update.averages
        if averages is None:
            raise UserError("this engine keeps no averages; make it with parallelize(…, average=0.9999)")
        if averages.is_shown:
            yield
            return
        self._step.check_closed("engine.averaged()")
        with self._watch.other_weights(self._show_averages, averages.hide):
            yield

    def _show_averages(self) -> None:
        self._show_newest()
        self._checkpointing.before_update()
        assert self._update.averages is not None
        self._update.averages.show()

    def full_state_dict(self, *, to: str | None = None, averaged: bool = False) -> dict[str, Tensor]:
        """All weights and buffers, whole, under their original names, on every rank (copies).

        to="rank0" brings them to the host memory of rank 0, one after the other; the other ranks get none.
        averaged=True: the averages of the weights, in the type of these.
        """
        with self._averaged_if(averaged):
            return self._whole.state_dict(to)

    def _averaged_if(self, averaged: bool) -> AbstractContextManager[None]:
        return self.averaged() if averaged else nullcontext()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator of (name, tensor) over all weights and buffers, whole, under their original
        names, in the order of the model's state dict, on every rank: one at a time (docs/weights.md).

        All ranks must iterate in step; all may leave the loop early. A tensor is a copy on this rank's
        device, and its memory is taken for the next one: keep `tensor.clone()`. Tied weights come under each
        of their names. After a step, an update or a load, begin again.
        """
        begun = self._state_number()

        def check() -> None:
            self._check_open()
            if self._state_number() != begun:
                raise UserError(
                    "engine.weights() was begun before the last step or load, and would mix weights of "
                    "before and after it; finish the loop over weights first, or call engine.weights() again"
                )

        return self._whole.stream(check)

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """Inside, the model is whole on every rank, and called as its author wrote it: to generate, evaluate
        or export. All ranks must enter and leave together; the engine's own calls are refused inside.

        What a rank holds whole is not copied; the rest is put together, and must fit beside it. Modes,
        buffers and attributes are as before afterwards. Weights may be changed inside as between steps where
        they are not copies; of a copy a change is refused.
        """
        self._check_open()
        self._show_newest()
        with self._whole_model.installed() as model, self._watch.plain():
            yield model

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call `generate` of a model of transformers, with whole weights (see `whole`), in evaluation mode.

        Every rank returns what it generated: the same for the same inputs, also where tokens are sampled.
        """
        self._check_open()
        self._show_newest()
        return self._whole_model.generate(args, kwargs)

    def _state_number(self) -> tuple[int, int]:
        """Return a number that is another one after each step and load."""
        return self._counter.begun, self._checkpointing.num_loads

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state of each parameter, whole, under every original name (copies)."""
        return self._whole.optimizer_state()

    def export(self, folder: str | Path, *, shard_bytes: int = SHARD_BYTES, averaged: bool = False) -> None:
        """Write weights and buffers as a Hugging Face folder, which transformers loads if it knows the model.

        All ranks must call this. Rank 0 writes one tensor after the other, and holds in host memory what the
        tensor is made of (query, key and value of GPT-2) beside it. Any other rank holds one at a time.

        averaged=True writes the averages of the weights, in the type of these.
        """
        with self._averaged_if(averaged), self._watch.own_work():
            export(self.module, self._names, self._whole.weights(), folder, self.mesh.rank, shard_bytes)

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        merged: bool = False,
        shard_bytes: int = SHARD_BYTES,
        averaged: bool = False,
    ) -> None:
        """Write a model of transformers as its own save_pretrained does: from_pretrained loads the folder. Of
        a model of peft, write its adapters; or (`merged`) the model inside, with the adapters in its weights.

        All ranks must call this; see `export`.
        """
        with self._averaged_if(averaged), self._watch.own_work():
            weights, rank = self._whole.weights(), self.mesh.rank
            save_pretrained(self.module, self._names, weights, folder, rank, shard_bytes, merged=merged)

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
        self._checkpointing.saver.finish()

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
        return self._load(partial(open_whole, path, verify=verify), optimizer=optimizer, options=options)

    def load_saved(self, saved: SavedState) -> dict[str, Any]:
        """As `load`, from a checkpoint that is open: for all ranks, or of copies in memory, one for each."""
        return self._load(lambda: saved, optimizer=True, options=True)

    def _load(self, opened: Callable[[], SavedState], *, optimizer: bool, options: bool) -> dict[str, Any]:
        with self._watch.own_work():
            extra = self._checkpointing.load(opened, optimizer=optimizer, options=options)
            self._watch.forget()
        return extra


def _storages(setup: Setup, runner: StepRunner) -> dict[str, list[Tensor]]:
    """List the tensors that hold each category of memory but activations."""
    storages = setup.update.storages()
    storages["parameters"] = [*storages["parameters"], *runner.storages()]
    storages["buffers"] = [*setup.model.buffers(), *runner.buffer_copies()]
    return storages
