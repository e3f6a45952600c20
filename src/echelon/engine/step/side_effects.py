"""Side effects of forward passes: on attributes, buffers and generators they are undone, on weights they are
found, and torch's cache of cast weights is kept out. A step that took another way than others is noticed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from echelon.collectives.mesh import Mesh
from echelon.engine.model_checks import is_cut
from echelon.engine.step.python_state import PythonState
from echelon.errors import UserError
from echelon.nn.autograd.generators import GeneratorStates
from echelon.nn.forward_state import BufferSnapshot
from echelon.parallel.observer import ForwardPass, StepObserver
from echelon.parallel.stage import LocalStages
from echelon.plan import Plan

_LARGEST_BUFFER = 2**28  # bytes; larger ones are tables that no forward changes


@contextmanager
def without_side_effects(
    stages: Sequence[nn.Module], modules: Iterable[nn.Module], device: torch.device, loss: Any = None
) -> Iterator[None]:
    """Run forward passes of `stages`, then put back their buffers, all generators of random numbers, the
    modes and attributes of `modules`, and what they and the loss keep in Python."""
    modules = list(modules)
    state, generators = PythonState(modules, loss), GeneratorStates(device, modules)
    buffers = BufferSnapshot(stages, largest=_LARGEST_BUFFER)
    buffers.take()
    try:
        yield
    finally:
        buffers.restore(refused=True)
        generators.restore()
        state.restore()


@contextmanager
def as_checks(mesh: Mesh, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Count what is moved as checks, and run compiled layers as they are written: they stay compiled for the
    sizes of steps, and hooks see what is inside."""
    is_compiled = mesh.plan.compile or any(module._compiled_call_impl for module in modules)
    eager: AbstractContextManager[Any] = nullcontext()
    if is_compiled:
        eager = torch.compiler.set_stance("force_eager")
    with mesh.ledger.only_about("checks"), eager:
        yield


@final
class WithoutAutocastCache:
    """Cast a weight again at every use, as if no autocast were around the step."""

    # torch's cache lives as long as the outermost autocast: the second microbatch would use what the first
    # one has cast, and so would the next step, after an update. And the gradient of a weight would come after
    # all of its uses, when zero=3 has freed it.

    def __enter__(self) -> None:
        self._before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_cache_enabled(self._before)


# Weights. On one device a forward changes them once per step, from the whole batch. Ranks and microbatches
# that see parts of it would make other changes, each its own.


def frees_weights(plan: Plan) -> bool:
    """Return whether weights come and go: then each is compared when it is freed (data/zero/flat.py)."""
    is_sharded = plan.zero == 3 and plan.data * plan.context > 1  # ranks that hold the same
    return is_sharded or "parameters" in plan.offload


def keeps_changes(plan: Plan) -> bool:
    """Return whether one forward pass is all of a step's, and what it changes in weights stays: below float32
    masters overwrite it."""
    is_whole = plan.flushes and not is_cut(plan)
    return is_whole and plan.precision in ("fp32", "fp64")


@contextmanager
def unchanged_weights(
    modules: Sequence[nn.Module], plan: Plan, check_together: Callable[[Callable[[], None]], None]
) -> Iterator[None]:
    """Run passes of stages beside a step. Raise, on every rank, if they have changed weights: the first step
    would not find out any more. Where a forward may change them, they are put back."""
    if keeps_changes(plan) and not frees_weights(plan):
        with restored_weights(modules, plan):
            yield
        return
    # A rehearsal of units that are updated in the backward pass marks their weights as changed.
    is_checked = not frees_weights(plan) and plan.update == "step"
    changes = [WeightChanges(module, plan) for module in modules] if is_checked else []
    before = [change.states() for change in changes]
    yield

    def check() -> None:
        for change, states in zip(changes, before, strict=True):
            change.check(states)

    check_together(check)


@contextmanager
def restored_weights(modules: Iterable[nn.Module], plan: Plan) -> Iterator[None]:
    """Put the weights of `modules` back at the end, where a forward may change them."""
    is_kept = keeps_changes(plan) and not frees_weights(plan)
    weights = [weight for module in modules for weight in module.parameters()] if is_kept else []
    copies = [weight.detach().clone() for weight in weights]
    try:
        yield
    finally:
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(weights)):
            for weight, copy in zip(weights, copies, strict=True):
                weight.copy_(copy)


@final
class WeightChanges:
    """Compares the weights of one stage before and after a forward pass, which it is called around. Raises
    where the plan cannot keep a change; else `is_changed` says that there was one."""

    def __init__(self, stage: nn.Module, plan: Plan) -> None:
        self._plan, self.is_changed = plan, False
        names = {id(parameter): name for name, parameter in stage.named_parameters()}
        # Modules are asked for their weights each time: during a forward pass these may be versions of them.
        self._places = [
            (names[id(parameter)], module, key)
            for module in stage.modules()
            if not _renormalises(module)
            for key, parameter in module._parameters.items()
            if id(parameter) in names
        ]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before = self.states()
        try:
            yield
        except RuntimeError as error:
            # torch forbids to change a version in place.
            if "_OfVersion" in str(error) and "is a view" in str(error):
                raise self._error("weights") from error
            raise
        if keeps_changes(self._plan):
            self.is_changed = self.states() != before
        else:
            self.check(before)

    def check(self, before: list[tuple[int, int]]) -> None:
        """Raise if any weight is not as it was."""
        pairs = zip(self._places, before, self.states(), strict=True)
        changed = [place[0] for place, one, other in pairs if one != other]
        if changed:
            raise self._error(", ".join(dict.fromkeys(changed)))

    @torch.no_grad()
    def states(self) -> list[tuple[int, int]]:
        """Return the version of each weight and the bits of its sum, which tell of changes through `.data`:
        versions do not count these."""
        weights: list[Tensor] = [module._parameters[key] for _, module, key in self._places]  # type: ignore[misc]
        if not weights:
            return []
        real = [torch.view_as_real(w) if w.is_complex() else w for w in weights]
        sums = torch.stack([weight.sum(dtype=torch.float64) for weight in real])
        versions = [weight._version for weight in weights]  # after a read, which waits for new weights
        return list(zip(versions, sums.view(torch.int64).tolist(), strict=True))

    def _error(self, changed: str) -> UserError:
        return UserError(
            f"plan '{self._plan}': the forward changes {changed} in place, from what it sees of the batch; "
            "ranks, microbatches and the audit of the first step see parts of it; change weights between "
            "steps, or use data=1, microbatches=1 and fp32 with audit='off'"
        )


@final
class FirstForward(StepObserver):
    """Compares the weights of each stage before and after its first forward pass in training."""

    def __init__(self, local: LocalStages, plan: Plan) -> None:
        stages = {} if frees_weights(plan) else local.stages
        self._changes = {number: WeightChanges(stage.module, plan) for number, stage in stages.items()}
        self._unseen = set(stages)

    @property
    def has_changed(self) -> bool:
        """Return whether a forward pass that may change weights did."""
        return any(each.is_changed for each in self._changes.values())

    def around_layers(self, forward: ForwardPass) -> AbstractContextManager[None] | None:
        stage, _ = forward.slot
        if stage not in self._unseen or not torch.is_grad_enabled():
            return None
        self._unseen.remove(stage)
        return self._changes[stage]()


def renormalises_any(stage: nn.Module) -> bool:
    """Return whether a lookup table of the stage changes its rows in every forward pass."""
    return any(map(_renormalises, stage.modules()))


def _renormalises(module: nn.Module) -> bool:
    """Return whether a module changes its rows, and is accepted with that (model_checks.py)."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None


@final
class Ways:
    """Notices a step that took another way through the code of the model or loss: a branch that begins late.

        if self.calls > 1000: output = output - output.mean(0)      nothing shows it before it is taken

    torch numbers the nodes that a thread enters into graphs of autograd, one for each operation that may have
    a gradient. Two of these numbers count the nodes of a step: nothing is traced, and a step with as many as
    another has, nearly always, run the same operations.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._begin = 0

    def start(self) -> None:
        self._begin = torch._C._autograd._get_sequence_nr()

    def is_new(self) -> bool:
        """Return whether no step before had as many nodes since `start`."""
        count = torch._C._autograd._get_sequence_nr() - self._begin
        is_new = count not in self._known
        self._known.add(count)
        return is_new
