"""The audit: gradients that the plan's own machinery makes for a few samples against those of one device.

    all ranks    choose samples of the real batch, the same everywhere; each replica takes its part
    rank 0       whole weights, plain module, plain loss, plain autograd, in the modes of training
    all ranks    the passes of a step: microbatches, stages, sums over ranks; no update
    all ranks    compare what each would update with; what differs by more than rounding is an error

Both sides begin with the same buffers, attributes and generators, and leave none of them changed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.assembly import Assembly
from echelon.audit.agreement import RankAgreement
from echelon.audit.report import AuditResult, held, skipped
from echelon.collectives.alone import alone
from echelon.engine.audit_batch import AuditBatch, GivenBatch, choose_samples
from echelon.engine.autocast_cache import computed_type, without_autocast_cache
from echelon.engine.diagnosis import explain
from echelon.engine.free_memory import reason_not_to_take
from echelon.engine.gradient_comparison import (
    TIMES_DRAWS,
    TIMES_ROUNDING,
    TOLERANCES,
    Difference,
    compare_gradients,
)
from echelon.engine.missing_operation import missing_operation
from echelon.engine.reference import Reference, Result
from echelon.engine.samples import Scopes
from echelon.engine.step_runner import StepRunner
from echelon.engine.untouched import untouched
from echelon.errors import UserError
from echelon.generators import GeneratorStates
from echelon.gist import uncompressed
from echelon.mesh import Mesh
from echelon.ownership import VALUE, LocalParameter, OwnedSlice, own_run
from echelon.runtime import InWhole, LocalStages, Update

NAME = "gradients"
_DRAWN = (
    "in evaluation mode alone: the forward draws numbers of its own, which parts of a batch cannot repeat "
    "(docs/data-parallel.md says which they can)"
)


_REFUSED = "refused: "
_DRAWS = 3  # of rounding: where a model amplifies it, one says little


class Parts(NamedTuple):
    """Of an engine, what an audit runs: all of this rank."""

    model: nn.Module
    mesh: Mesh
    local: LocalStages
    update: Update
    runner: StepRunner
    scopes: Scopes
    in_whole: InWhole
    values: Callable[[], list[OwnedSlice]]  # weights and buffers


class _CannotCompareError(Exception):
    """Why nothing was compared, on every rank alike. `is_final`: another batch would change nothing."""

    def __init__(self, reason: str, *, is_final: bool = True) -> None:
        super().__init__(reason)
        self.is_final = is_final


class _Compared(NamedTuple):
    """One comparison. `whole`, `weights` and their causes are known on rank 0."""

    samples: AuditBatch
    whole: Result | None
    weights: Mapping[str, Tensor]
    found: list[Difference]
    has_drawn: bool


@final
class GradientAudit:
    """Compares gradients on all ranks together, between steps; workers of sync=async each for itself."""

    def __init__(self, parts: Parts, reference: Reference, agreement: RankAgreement) -> None:
        self._parts, self._reference, self._agreement = parts, reference, agreement
        mesh = parts.mesh
        self._group = mesh.group("all") if mesh.plan.ranks > 1 and mesh.plan.sync != "async" else None
        inside = [module for stage in parts.local.modules for module in stage.modules()]
        self._modules = list(dict.fromkeys([*parts.model.modules(), *inside]))

    @property
    def replica(self) -> int:
        return self._parts.mesh.position.replica

    @property
    def _type(self) -> torch.dtype:
        return computed_type(self._reference.device, self._reference.dtype)

    def __call__(
        self, batch: GivenBatch, step: int, *, traits: Tensor | None = None, known: int = 0, source: int = 0
    ) -> AuditResult:
        """Raise, on every rank, if the plan would train something else than one device."""
        choose = partial(choose_samples, batch, traits, known, source, self._parts.mesh, self._agreement)
        try:
            with self._quiet(), uncompressed():
                compared = self._compare(choose, step)
                self._raise_if(compared, step)
                if compared.found and compared.has_drawn:
                    self._raise_if(self._compare(choose, step, training=False), step)
                    return skipped(NAME, _DRAWN)
        except _CannotCompareError as reason:
            return skipped(NAME, str(reason), is_final=reason.is_final)
        return held(NAME)

    def _compare(
        self, choose: Callable[..., AuditBatch | None], step: int, *, training: bool = True
    ) -> _Compared:
        weights = self._whole_weights()
        samples, whole, has_drawn = self._run_reference(choose, weights, step, training=training)
        generators = GeneratorStates(self._parts.mesh.device, self._modules) if has_drawn else None
        owned, factor = self._run_plan(samples, step, generators, training=training)
        gradients = {} if whole is None else whole.gradients
        likes, device = self._reference.form.gradients_like(self._reference.dtype), self._reference.device
        differences = compare_gradients(owned, gradients, likes, factor, self._group, device)
        self._parts.local.start_step()  # no gradient is left
        tolerance = TOLERANCES[self._type]
        found = [each for each in differences if not each.relative <= tolerance]
        if found and self._parts.update.loss_scaling is not None and _overflows(found):
            raise _CannotCompareError("gradients overflow at this loss scale", is_final=False)
        return _Compared(samples, whole, weights, found, has_drawn)

    def _raise_if(self, compared: _Compared, step: int) -> None:
        error = self._judge(compared, step) if compared.whole is not None and compared.found else ""
        error = self._first_text(error)
        if error:
            raise UserError(error)

    def _judge(self, compared: _Compared, step: int) -> str:
        """On rank 0: an error, if neither rounding nor other draws can be what makes gradients differ."""
        samples, whole, weights, found, has_drawn = compared
        assert whole is not None
        run = partial(self._reference.run, samples.whole, weights, step)
        eps = torch.finfo(self._type).eps
        others = [(TIMES_ROUNDING, run(rounding=eps, draw=draw)) for draw in range(_DRAWS)]
        others += [(TIMES_DRAWS, run(is_second=True))] if has_drawn else []
        beyond = [each for each in found if not each.distance <= _explained(each.name, whole, others)]
        if not beyond:
            return ""
        return explain(beyond, whole, samples, self._reference, weights, self._parts.mesh.plan, step)

    # One device.

    def _whole_weights(self) -> dict[str, Tensor]:
        """On rank 0: the weights and buffers that it does not have whole. All ranks give their parts."""
        form, device = self._reference.form, self._reference.device
        missing = form.missing(device) if self._agreement.rank == 0 else []
        needed = form.num_bytes(missing, self._reference.dtype)
        names, reason = self._agreement.gather([missing, reason_not_to_take(needed, device)])[0]
        if reason:
            raise _CannotCompareError(reason)
        wanted = set(names)
        if not wanted:
            return {}
        owned = [
            each for each in self._parts.values() if each.slice.part == VALUE and each.slice.name in wanted
        ]
        if self._group is None:
            return {each.slice.name: each.tensor.detach().to(device) for each in owned}
        assembly = Assembly(owned, self._group, device)
        whole = {key[0]: assembly.tensor(key, to=0) for key in sorted(assembly)}
        return {name: tensor for name, tensor in whole.items() if tensor is not None}

    def _run_reference(
        self,
        choose: Callable[..., AuditBatch | None],
        weights: Mapping[str, Tensor],
        step: int,
        *,
        training: bool,
    ) -> tuple[AuditBatch, Result | None, bool]:
        """The samples, what one device computes of them (on rank 0), and whether it drew random numbers. A
        model that does not take a small part of a microbatch is given whole ones."""
        failure = ""
        for is_small in (True, False):
            samples = choose(is_small=is_small)
            if samples is None:
                raise _CannotCompareError("a replica has no sample", is_final=False)
            result = self._try_reference(samples, weights, step, training=training)
            is_result = isinstance(result, Result)
            said: list[Any] = [0, False, result]
            if isinstance(result, Result):
                said = [result.counted, result.has_drawn, ""]
            counted, has_drawn, failure = self._agreement.gather(said)[0]
            if failure.startswith(_REFUSED):  # as the step itself would be
                raise UserError(failure.removeprefix(_REFUSED))
            if not failure:
                if not counted:
                    raise _CannotCompareError("the loss counts none of its samples", is_final=False)
                return samples, result if is_result else None, has_drawn  # type: ignore[return-value]
        missing = missing_operation(failure, self._parts.mesh.plan, self._reference.device)
        if missing is not None:
            raise missing
        raise _CannotCompareError(f"the model cannot be run by itself: {failure}")

    def _try_reference(
        self, samples: AuditBatch, weights: Mapping[str, Tensor], step: int, *, training: bool
    ) -> Result | str:
        """On rank 0: what one device computes, or why it cannot; the plan would fail in the middle of it."""
        if self._agreement.rank != 0:
            return ""
        scale = float(self._parts.update.loss_scale)
        try:
            with alone("rank 0 runs this by itself, and it needs weights of another engine"):
                if len(samples.bounds) > 1:
                    self._reference.check_takes(samples.part(0), weights, step)
                return self._reference.run(samples.whole, weights, step, training=training, scale=scale)
        except UserError as refusal:
            return f"{_REFUSED}{refusal}"
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]

    # The plan.

    def _run_plan(
        self, samples: AuditBatch, step: int, generators: GeneratorStates | None, *, training: bool
    ) -> tuple[list[OwnedSlice], float]:
        """This rank's gradients as boxes of whole ones, and what makes them those of the mean."""
        local, units, device = self._parts.local, self._parts.update.units, self._parts.mesh.device
        captured: dict[Tensor, Tensor] = {}
        with ExitStack() as stack:
            stack.enter_context(untouched(local.modules, self._modules, device))
            if not training:
                for module in self._modules:
                    module.training = False
            if units is not None:  # else gradients are gone when their unit is updated
                stack.enter_context(units.rehearse(partial(_capture, captured)))
            scope = partial(self._scope, samples, step, generators)
            tally = self._parts.runner.differentiate(samples.local, step, scope)
            if units is not None:
                units.finish_passes()
        if self._group is not None:
            with self._group.ledger.about("checks"):
                self._group.all_reduce(tally)
        _, count, weighted = tally[:3].tolist()
        return self._owned(captured), weighted / count / count if count else 0.0

    @contextmanager
    def _scope(
        self, samples: AuditBatch, step: int, generators: GeneratorStates | None, number: int
    ) -> Iterator[None]:
        """Of a microbatch: where its samples are among those of one device, whose first draws are its own."""
        if generators is not None:
            generators.restore()
        place = samples.places[number % len(samples.places)]
        with self._parts.scopes.at_place(step, place, samples.per_part):
            yield

    def _owned(self, captured: Mapping[Tensor, Tensor]) -> list[OwnedSlice]:
        owned = []
        for sharing in self._parts.local.sharings:
            for each in sharing.summed_parameters():
                gradient = captured.get(each.tensor, each.tensor.grad)
                if gradient is not None:
                    dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
                    boxes = own_run(dense, sharing.slices(each))
                    owned += [box for own in boxes for box in self._parts.in_whole(own)]
        return owned

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """What is moved counts as checks; compiled layers stay compiled for the sizes of the steps."""
        mesh = self._parts.mesh
        is_compiled = mesh.plan.compile or any(module._compiled_call_impl for module in self._modules)
        eager: AbstractContextManager[Any] = nullcontext()
        if is_compiled:
            eager = torch.compiler.set_stance("force_eager")
        with mesh.ledger.only_about("checks"), eager, without_autocast_cache():
            yield

    def _first_text(self, text: str) -> str:
        return next((each for each in self._agreement.gather(text) if each), "")


def _capture(captured: dict[Tensor, Tensor], local: Sequence[LocalParameter]) -> None:
    captured |= {each.tensor: each.tensor.grad.clone() for each in local if each.tensor.grad is not None}


def _explained(name: str, whole: Result, others: Sequence[tuple[float, Result]]) -> float:
    """How far gradients of one device are from each other, times what is allowed."""
    distances = [
        times * float((whole.gradients[name] - other.gradients[name]).double().norm())
        for times, other in others
        if name in whole.gradients and name in other.gradients
    ]
    return max(distances, default=0.0)


def _overflows(found: Sequence[Difference]) -> bool:
    return any(each.distance == float("inf") for each in found)
