"""Trial forwards: samples of a batch through the stages of all ranks, as a training step would take them, but
without gradients and without a trace. The audit compares what comes out.

A stage that raises passes a mark on instead of its output, so that no other stage waits for it: a model may
refuse a part of a microbatch, and still train.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map

from echelon.engine.buffer_snapshot import Slot
from echelon.engine.layer_sharding import LayerSharding
from echelon.engine.padding import LocalTargets
from echelon.engine.step_runner import StepRunner
from echelon.engine.untouched import untouched
from echelon.errors import UserError
from echelon.generators import GeneratorStates
from echelon.mesh import Mesh
from echelon.runtime import Interpreter, LocalStages, Microbatch, MicrobatchLoss, Stage

_FAILED = "(failed)"
Scope = Callable[[], AbstractContextManager[None]]


class Trial(NamedTuple):
    """Samples, and what opens their place in the training."""

    part: Any
    scope: Scope


class Outcome(NamedTuple):
    """What the loss of a step would see of a trial."""

    output: Any
    targets: Any
    share: float = 1.0  # of the samples that a mean counts, this rank's


class Outcomes(NamedTuple):
    """Of several trials: what came out where this rank has the last stage, else nothing."""

    outcomes: list[Outcome | None]
    failure: str  # what a stage of this rank raised; empty if none did
    has_drawn: bool  # whether a forward here drew numbers from a generator, global or of a module
    changed: list[Slot]  # buffers that it changed, other than running statistics of nn.BatchNorm


@final
class TrialForward:
    """Runs trials on all ranks together, between steps."""

    def __init__(
        self, runner: StepRunner, mesh: Mesh, local: LocalStages, layers: LayerSharding, root: nn.Module
    ) -> None:
        self._runner, self._mesh, self._local, self._layers = runner, mesh, local, layers
        inside = [each for stage in local.modules for each in stage.modules()]
        self._modules = list(dict.fromkeys([*root.modules(), *inside]))
        self._failures: list[str] = []
        self._runtime = _TrialRuntime(layers, self._failures)
        stages: Any = {n: _TrialStage(stage, self._failures) for n, stage in local.stages.items()}
        self._interpreter = Interpreter(stages, self._runtime, runner.wire, mesh.device, None)
        # Stages with replicas: all of them take part, in copies of one trial.
        self._copies = math.lcm(*mesh.plan.replicas)

    @torch.no_grad()
    def run(
        self,
        trials: Sequence[Trial],
        *,
        evaluating: Sequence[nn.Module] = (),
        training: bool = True,
        carries: bool = True,
        disturbed: Sequence[Slot] = (),
    ) -> Outcomes:
        """Modules of `evaluating` are in evaluation mode, and all unless `training`. `carries`: buffers that
        one trial changes are so in the next one. Buffers that are `disturbed` have other values."""
        outcomes: list[Outcome | None] = []
        device = self._mesh.device
        self._failures.clear()
        self._has_drawn = False
        for stage in self._local.stages.values():  # trials are compared with each other
            stage.hold_iterations()
        marks = self._marks()
        with self._quiet(), untouched(self._local.modules, self._modules, device):
            for module in self._modules if not training else evaluating:
                module.training = False
            for module, name in disturbed:
                _disturb(module._buffers[name])
            for trial in trials:
                with nullcontext() if carries else untouched(self._local.modules, (), device):
                    outcomes.append(self._run(trial))
            changed = [slot for slot, mark in self._marks().items() if marks.get(slot) != mark]
        return Outcomes(outcomes, next(iter(self._failures), ""), self._has_drawn, changed)

    def _marks(self) -> dict[Slot, tuple[int, int]]:
        """What changes when a forward changes a buffer."""
        modules = {module for stage in self._local.modules for module in stage.modules()}
        return {
            (module, name): (id(buffer), buffer._version)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None and not isinstance(module, _NormBase)
        }

    def _run(self, trial: Trial) -> Outcome | None:
        # Whoever forwards may change its inputs, and they are the user's.
        part = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, trial.part)
        microbatch = self._runner.make_microbatch(part, 1, "audit", trial.scope)
        feed = dict.fromkeys(range(self._copies), microbatch)
        self._runtime.outcome = None
        before = GeneratorStates(self._mesh.device, self._modules)
        self._interpreter.run(self._runner.forward_script(self._copies), feed)
        self._has_drawn |= before.moved()
        return self._runtime.outcome

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """What is moved counts as checks; compiled layers stay compiled for the sizes of the steps."""
        is_compiled = self._mesh.plan.compile or any(m._compiled_call_impl for m in self._modules)
        eager = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
        with self._mesh.ledger.only_about("checks"), eager:
            yield


def _disturb(buffer: Tensor | None) -> None:
    """Other values of about the same size; integers stay, because they may be places."""
    if buffer is not None and buffer.is_floating_point() and buffer.layout == torch.strided:
        noise = torch.linspace(-1, 1, buffer.numel(), dtype=buffer.dtype, device=buffer.device).cos_()
        buffer.add_(noise.view(buffer.shape) * buffer.abs().mean())


class _TrialStage:
    """A stage that always returns."""

    def __init__(self, stage: Stage, failures: list[str]) -> None:
        self._stage, self._failures = stage, failures
        self.gather, self.free = stage.gather, stage.free

    def forward(self, value: Any) -> Any:
        if _has_failed(value):
            return value
        try:
            return self._stage.forward(value)
        except Exception as error:
            self._failures.append(_headline(error))
            return {_FAILED: True}


def _headline(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _has_failed(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {_FAILED}


class _TrialRuntime:
    """What instructions mean in a trial: the interpreter's StageRuntime."""

    counts_loss = False

    def __init__(self, layers: LayerSharding, failures: list[str]) -> None:
        self._layers, self._failures = layers, failures
        self.outcome: Outcome | None = None

    def loss(self, output: Any, microbatch: Microbatch) -> MicrobatchLoss:
        """Keeps what the loss would see."""
        targets: LocalTargets = microbatch.targets
        if not _has_failed(output):
            try:
                self.outcome = Outcome(*self._layers.without_padding(output, targets), targets.share)
            except UserError as error:  # which the step itself raises, of all its samples
                self._failures.append(_headline(error))
        return MicrobatchLoss(torch.zeros(()), 0.0, 1.0)

    def around(
        self,
        microbatch: Microbatch,
        slot: tuple[int, int],  # noqa: ARG002
        value: Any,  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        return microbatch.scope()

    def store(self, slot: tuple[int, int]) -> None:
        raise AssertionError(f"a trial keeps nothing of {slot}")

    def fetch(self, slot: tuple[int, int]) -> None:
        raise AssertionError(f"a trial keeps nothing of {slot}")

    def set_aside(self, slot: tuple[int, int]) -> None:
        raise AssertionError(f"a trial keeps nothing of {slot}")

    def start_backwards(self, tally: Tensor) -> None:
        raise AssertionError(f"a trial has no backward passes, and no {tally}")

    def reduce(self, stage: Stage) -> None:
        raise AssertionError(f"stage {stage.index} has no gradients in a trial")

    def tie(self) -> None:
        raise AssertionError("a trial has no gradients")

    def norm(self, tally: Tensor) -> None:
        raise AssertionError(f"a trial has no norm, and no {tally}")

    def update(self) -> None:
        raise AssertionError("a trial has no update")

    def publish(self) -> None:
        raise AssertionError("a trial has no new weights")
