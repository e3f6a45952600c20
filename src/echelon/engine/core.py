"""What an engine is made of, and what it tells of itself; its calls are in the files beside this one."""

from functools import partial

import torch
from torch import Tensor

from echelon.collectives import Ledger
from echelon.engine.audit import AuditResult
from echelon.engine.audit.auditing import AuditSettings, make_audit
from echelon.engine.audit.drift import DriftCheck, find_copies
from echelon.engine.own_loop import OwnLoop, OwnPasses
from echelon.engine.saving.checkpointing import Checkpointing
from echelon.engine.saving.engine_state import EngineState
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
from echelon.state.ownership import OwnedSlice


class EngineCore:
    """The parts of an engine."""

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


def _storages(setup: Setup, runner: StepRunner) -> dict[str, list[Tensor]]:
    """List the tensors that hold each category of memory but activations."""
    storages = setup.update.storages()
    storages["parameters"] = [*storages["parameters"], *runner.storages()]
    storages["buffers"] = [*setup.model.buffers(), *runner.buffer_copies()]
    return storages
