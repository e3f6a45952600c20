"""Whether a forward pass changes weights: found in the first one of a training, by comparing them.

On one device such a change is made once per step, from the whole batch. Ranks and microbatches that see parts
of it would make others, each its own.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import final

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from echelon.engine.model_checks import is_cut
from echelon.errors import UserError
from echelon.parallel.observer import ForwardPass, StepObserver
from echelon.parallel.stage import LocalStages
from echelon.plan import ASYNCHRONOUS_SCHEDULES, Plan


def may_change_weights(plan: Plan) -> bool:
    """Whether a forward pass is all of a step's, and what it leaves in the weights stays there: below float32
    masters overwrite it. With zero=3, where weights come and go, whoever frees one looks whether it was
    changed (parallel/data/zero/flat.py)."""
    is_whole = plan.schedule not in ASYNCHRONOUS_SCHEDULES and not is_cut(plan)
    return frees_weights(plan) or (is_whole and plan.precision in ("fp32", "fp64"))


def frees_weights(plan: Plan) -> bool:
    """Whether weights come and go."""
    is_sharded = plan.zero == 3 and plan.data * plan.context > 1  # ranks that hold the same
    return is_sharded or "parameters" in plan.offload


@contextmanager
def kept_weights(modules: Iterable[nn.Module]) -> Iterator[None]:
    """What is done to the weights of `modules` inside is undone."""
    weights = [weight for module in modules for weight in module.parameters()]
    copies = [weight.detach().clone() for weight in weights]
    try:
        yield
    finally:
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(weights)):
            for weight, copy in zip(weights, copies, strict=True):
                weight.copy_(copy)


@final
class WeightChanges:
    """Compares the weights of one stage. Call it around a forward pass that must not change them."""

    def __init__(self, stage: nn.Module, plan: Plan) -> None:
        self._plan = plan
        names = {id(parameter): name for name, parameter in stage.named_parameters()}
        # Where modules have them: during a forward pass these may be versions of the weights.
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
        self.check(before)

    def check(self, before: list[tuple[int, int]]) -> None:
        """Raise if any weight is not as it was."""
        pairs = zip(self._places, before, self.states(), strict=True)
        changed = [place[0] for place, one, other in pairs if one != other]
        if changed:
            raise self._error(", ".join(dict.fromkeys(changed)))

    @torch.no_grad()
    def states(self) -> list[tuple[int, int]]:
        """Of each weight its version, and the bits of its sum: these tell of changes through `.data`, which
        versions do not count."""
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
class ChangeRecord:
    """Remembers whether the first forward pass, which may change weights, does."""

    def __init__(self, stage: nn.Module, plan: Plan) -> None:
        self._changes = WeightChanges(stage, plan)
        self.is_changed = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before = self._changes.states()
        yield
        self.is_changed = self._changes.states() != before


@final
class FirstForward(StepObserver):
    """Compares the weights of each stage before and after its first forward pass in training."""

    def __init__(self, local: LocalStages, plan: Plan) -> None:
        self._unseen: dict[int, Callable[[], AbstractContextManager[None]]] = {}
        self._records: list[ChangeRecord] = []
        for number, stage in local.stages.items():
            if not may_change_weights(plan):
                self._unseen[number] = WeightChanges(stage.module, plan)
            elif not frees_weights(plan):
                self._unseen[number] = record = ChangeRecord(stage.module, plan)
                self._records.append(record)

    @property
    def has_changed(self) -> bool:
        """Whether a forward pass that may change weights did."""
        return any(record.is_changed for record in self._records)

    def around_layers(self, forward: ForwardPass) -> AbstractContextManager[None] | None:
        if not self._unseen or not torch.is_grad_enabled():
            return None
        check = self._unseen.pop(forward.slot[0], None)
        return None if check is None else check()


def renormalises_any(stage: nn.Module) -> bool:
    return any(map(_renormalises, stage.modules()))


def _renormalises(module: nn.Module) -> bool:
    """Whether it is known to change its rows, and accepted (model_checks.py)."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
