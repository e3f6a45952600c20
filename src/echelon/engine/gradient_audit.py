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
from echelon.engine.audit_batch import AuditBatch, choose_samples
from echelon.engine.diagnosis import explain
from echelon.engine.free_memory import free_bytes
from echelon.engine.gradient_comparison import TIMES_ROUNDING, TOLERANCES, Difference, compare_gradients
from echelon.engine.reference import Reference, Result
from echelon.engine.samples import Scopes
from echelon.engine.step_runner import StepRunner
from echelon.engine.untouched import untouched
from echelon.errors import UserError
from echelon.gist import uncompressed
from echelon.mesh import Mesh
from echelon.ownership import VALUE, LocalParameter, OwnedSlice, own_run
from echelon.quantities import show_bytes
from echelon.runtime import InWhole, LocalStages, Update

NAME = "gradients"


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

    def __call__(
        self, batch: Any, step: int, *, traits: Tensor | None = None, known: int = 0, source: int = 0
    ) -> AuditResult:
        """Raise, on every rank, if the plan would train something else than one device."""
        mesh = self._parts.mesh
        samples = choose_samples(batch, traits, known, source, mesh, self._agreement)
        if samples is None:
            return skipped(NAME, "a replica has no sample", is_final=False)
        with self._quiet(), uncompressed():
            weights = self._whole_weights()
            if isinstance(weights, str):
                return skipped(NAME, weights)
            result = self._run_reference(samples, weights, step)
            failure = self._first_text(result if isinstance(result, str) else "")
            if failure:
                return skipped(NAME, f"the model cannot be run by itself: {failure}")
            whole = None if isinstance(result, str) else result
            return self._compare(samples, whole, weights, step)

    def _compare(
        self, samples: AuditBatch, whole: Result | None, weights: Mapping[str, Tensor], step: int
    ) -> AuditResult:
        owned, factor, failure = self._run_plan(samples, step)
        failure = self._first_text(failure)
        if failure:
            return skipped(NAME, f"the plan does not take so few samples: {failure}")
        reference = {} if whole is None else whole.gradients
        likes = self._reference.form.gradients_like(self._reference.dtype)
        differences = compare_gradients(owned, reference, likes, factor, self._group, self._reference.device)
        del owned
        tolerance = TOLERANCES[self._reference.dtype]
        found = [each for each in differences if not each.relative <= tolerance]
        if found and self._parts.update.loss_scaling is not None and _overflows(found):
            return skipped(NAME, "gradients overflow at this loss scale", is_final=False)
        error = self._judge(found, samples, whole, weights, step) if found and whole is not None else ""
        error = self._first_text(error)
        if error:
            raise UserError(error)
        return held(NAME)

    # One device.

    def _whole_weights(self) -> dict[str, Tensor] | str:
        """On rank 0: the weights and buffers that it does not have whole. All ranks give their parts."""
        form, device = self._reference.form, self._reference.device
        missing = form.missing(device) if self._agreement.rank == 0 else []
        needed = form.num_bytes(missing, self._reference.dtype)
        (names, reason) = self._agreement.gather([missing, _reason_not(needed, device)])[0]
        if reason:
            return str(reason)
        if not names or self._group is None:
            return {}
        wanted = set(names)
        owned = [
            each for each in self._parts.values() if each.slice.part == VALUE and each.slice.name in wanted
        ]
        assembly = Assembly(owned, self._group, device)
        whole = {key[0]: assembly.tensor(key, to=0) for key in sorted(assembly)}
        return {name: tensor for name, tensor in whole.items() if tensor is not None}

    def _run_reference(
        self, samples: AuditBatch, weights: Mapping[str, Tensor], step: int
    ) -> Result | str | None:
        """On rank 0: what one device computes, or why it cannot."""
        if self._agreement.rank != 0:
            return None
        try:
            return self._reference.run(samples.whole, weights, step)
        except Exception as error:
            return _headline(error)

    def _judge(
        self,
        found: Sequence[Difference],
        samples: AuditBatch,
        whole: Result,
        weights: Mapping[str, Tensor],
        step: int,
    ) -> str:
        """On rank 0: an error, if rounding cannot be what makes gradients differ."""
        eps = torch.finfo(self._reference.dtype).eps
        disturbed = self._reference.run(samples.whole, weights, step, rounding=eps).gradients
        beyond = []
        for each in found:
            one, other = whole.gradients.get(each.name), disturbed.get(each.name)
            rounding = 0.0 if one is None or other is None else float((one - other).double().norm())
            if not each.distance <= TIMES_ROUNDING * rounding:
                beyond.append(each)
        if not beyond:
            return ""
        return explain(beyond, whole, samples, self._reference, weights, self._parts.mesh.plan, step)

    # The plan.

    def _run_plan(self, samples: AuditBatch, step: int) -> tuple[list[OwnedSlice], float, str]:
        """This rank's gradients as boxes of whole ones, and what makes them those of the mean."""
        local, runner, units = self._parts.local, self._parts.runner, self._parts.update.units
        captured: dict[Tensor, Tensor] = {}
        scope = lambda number: self._parts.scopes.at_place(step, samples.places[number])  # noqa: E731
        with ExitStack() as stack:
            stack.enter_context(untouched(local.modules, self._modules, self._parts.mesh.device))
            if units is not None:  # else gradients are gone when their unit is updated
                stack.enter_context(units.rehearse(partial(_capture, captured)))
            try:
                tally = runner.differentiate(samples.local, step, scope)
            except UserError:
                raise
            except Exception as error:
                if runner.is_broken or self._parts.mesh.plan.ranks > self._parts.mesh.plan.data:
                    raise
                return [], 0.0, _headline(error)
            finally:
                if units is not None:
                    units.finish_passes()
        if self._group is not None:
            with self._group.ledger.about("checks"):
                self._group.all_reduce(tally)
        _, count, weighted = tally[:3].tolist()
        return self._owned(captured), weighted / count / count if count else 0.0, ""

    def _owned(self, captured: Mapping[Tensor, Tensor]) -> list[OwnedSlice]:
        owned = []
        for sharing, each in self._parts.local.slices():
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
        eager: AbstractContextManager[Any] = (
            torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
        )
        with mesh.ledger.only_about("checks"), eager:
            yield

    def _first_text(self, text: str) -> str:
        return next((each for each in self._agreement.gather(text) if each), "")


def _capture(captured: dict[Tensor, Tensor], local: Sequence[LocalParameter]) -> None:
    captured |= {each.tensor: each.tensor.grad.clone() for each in local if each.tensor.grad is not None}


def _overflows(found: Sequence[Difference]) -> bool:
    return any(each.distance == float("inf") for each in found)


def _reason_not(needed: int, device: torch.device) -> str:
    free = free_bytes(device)
    if 2 * needed <= free:
        return ""
    return (
        f"whole weights and gradients take {show_bytes(needed)} on rank 0, which has {show_bytes(free)} "
        "free, half of it for the audit"
    )


def _headline(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
