"""The audit: gradients that the plan's own machinery makes for a few samples against those of one device.

    all ranks    choose samples of the real batch, the same everywhere; each replica takes its part
    rank 0       whole weights, plain module, plain loss, plain autograd, in the modes of training
    all ranks    the passes of a step: microbatches, stages, sums over ranks; no update
    all ranks    compare what each would update with; what differs by more than rounding is an error

Both sides begin with the same buffers, attributes and generators, and leave none of them changed.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import chain
from typing import NamedTuple, final

import torch
from torch import Tensor

from echelon.collectives.agreement import RankAgreement
from echelon.engine.audit import AuditResult, held, skipped
from echelon.engine.audit.audit_batch import AuditBatch, GivenBatch, choose_samples
from echelon.engine.audit.diagnosis import explain
from echelon.engine.audit.gradient_comparison import (
    TIMES_DRAWS,
    TIMES_PRECISE,
    TIMES_ROUNDING,
    TOLERANCES,
    Comparison,
    Difference,
    KeptGradients,
    share_gradients,
)
from echelon.engine.audit.hook_limits import refuse_limits, watched_hooks
from echelon.engine.audit.one_device import CannotCompareError, FailedRunError, OneDevice
from echelon.engine.audit.reference import Reference, Result, Run
from echelon.engine.model_checks import is_cut
from echelon.engine.saving.engine_state import EngineState
from echelon.engine.step.counted_numbers import CountedNumbers
from echelon.engine.step.missing_operation import missing_operation
from echelon.engine.step.normaliser import workers_per_update
from echelon.engine.step.runner import StepRunner
from echelon.engine.step.samples import Scopes
from echelon.engine.step.side_effects import (
    WithoutAutocastCache,
    as_checks,
    unchanged_weights,
    without_side_effects,
)
from echelon.errors import UserError
from echelon.memory.gist.compression import uncompressed
from echelon.nn.autograd.generators import GeneratorStates
from echelon.nn.batch import num_samples
from echelon.nn.forward_state import ChangedBuffers
from echelon.state.ownership import LocalParameter, OwnedSlice, own_run, whole_slice

NAME = "gradients"
_DRAWN = (
    "in evaluation mode alone: the forward draws numbers of its own, which parts of a batch cannot repeat "
    "(docs/data-parallel.md says which they can)"
)
_COUNTED = "forwards count something in {}, and each rank and microbatch counts its own share"
_LEFT = "forwards leave something else than one device in buffers that no checkpoint has: {}"

_DRAWS = 3  # of rounding: where a model amplifies it, one says little

Choose = Callable[..., AuditBatch | None]


class _Compared(NamedTuple):
    """One comparison, on every rank."""

    samples: AuditBatch
    run: Run
    result: Result
    found: list[Difference]
    hooks: dict[str, str]  # with a limit, by the name of their weight


@final
class GradientAudit:
    """Compares gradients on all ranks together, between steps; workers of sync=async each for itself."""

    def __init__(
        self,
        state: EngineState,
        runner: StepRunner,
        scopes: Scopes,
        reference: Reference,
        agreement: RankAgreement,
    ) -> None:
        self._state, self._runner, self._scopes = state, runner, scopes
        self._reference, self._agreement = reference, agreement
        self._mesh, self._local, self._update = state.mesh, state.local, state.update
        self.replica = state.mesh.position.replica
        self._device = OneDevice(reference, state.values, agreement)
        self._repeats = True  # whether samples may be given to several replicas and microbatches
        self._modules = state.modules
        self._numbers = CountedNumbers(reference.model, state.local, agreement)
        self._told: set[str] = set()  # numbers and buffers that were warned of

    @property
    def _type(self) -> torch.dtype:
        """Return the coarsest type of what is computed: autocast casts all but float64."""
        kind, dtype = self._reference.device.type, self._reference.dtype
        if dtype == torch.float64 or not torch.is_autocast_enabled(kind):
            return dtype
        return max(dtype, torch.get_autocast_dtype(kind), key=lambda each: torch.finfo(each).eps)

    def __call__(
        self,
        batch: GivenBatch,
        step: int,
        *,
        traits: Tensor | None,
        new: Tensor | None,
        source: int,
        all_samples: bool = False,
    ) -> AuditResult:
        """Raise, on every rank, if the plan would train something else than one device."""
        self._takes_all = all_samples
        if self._mesh.plan.stages > 1:
            self._numbers.share()
        choose = partial(choose_samples, batch, traits, new, source, self._mesh, self._agreement)
        with (
            unchanged_weights(self._local.modules, self._mesh.plan, self._agreement.check),
            as_checks(self._mesh, self._modules),
            WithoutAutocastCache(),
            uncompressed(),
        ):
            return self._audit(choose, step)

    def _audit(self, choose: Choose, step: int) -> AuditResult:
        for sharing in self._local.sharings:  # of the last update, which the host may still make
            sharing.wait_for_weights(sharing.local_parameters())
        try:
            with self._device.ready():
                compared = self._compare(choose, step)
                self._raise_if(compared)
                self._agreement.check(lambda: refuse_limits(compared.hooks, self._mesh.plan))
                if compared.found and compared.result.has_drawn:
                    self._raise_if(self._compare(choose, step, training=False))
                    return skipped(NAME, _DRAWN)
                if self._mesh.plan.flushes and not (compared.found or compared.result.has_drawn):
                    self._check_buffers(compared.result.buffers, step)
        except CannotCompareError as reason:
            return skipped(NAME, str(reason), is_final=reason.is_final)
        except FailedRunError as error:
            missing = missing_operation(str(error), self._mesh.plan, self._reference.device)
            if missing is not None:
                raise missing from None
            return skipped(NAME, f"the model cannot be run by itself: {error}")
        return held(NAME)

    def _compare(self, choose: Choose, step: int, *, training: bool = True) -> _Compared:
        samples, run, result = self._rehearse(choose, step, training=training)
        if self._mesh.plan.flushes:
            self._numbers.learn(result.counted_by)
        generators = GeneratorStates(self._mesh.device, self._modules) if result.has_drawn else None
        plan = self._mesh.plan
        is_watched = plan.sync != "async" and plan.flushes and is_cut(plan)
        trained = (pair for sharing in self._local.sharings for pair in sharing.parameter_set.trained)
        with watched_hooks(trained if is_watched else ()) as hooks:
            comparison = Comparison(*self._run_plan(samples, step, generators, training=training))
        if self._mesh.plan.flushes:
            self._warn_once(self._numbers.compare(result.counted_by), _COUNTED)
        try:
            result = self._device.gradients(run, comparison.take)
            differences = comparison.differences(self._agreement.group)
        finally:
            self._local.start_step()  # no gradient is left
        tolerance = TOLERANCES[self._type]
        found = [each for each in differences if not each.relative <= tolerance]
        overflows = any(each.distance == float("inf") for each in found)
        if overflows and self._update.loss_scaling is not None:
            raise CannotCompareError("gradients overflow at this loss scale", is_final=False)
        # Of one microbatch, or of the whole batch on one device: in other elements, and no update is right.
        is_broken = any(each.reference_overflows for each in differences)
        if overflows and is_broken and any(each.plan_overflows for each in differences):
            raise CannotCompareError("gradients are not finite, on one device either", is_final=False)
        return _Compared(samples, run, result, found, hooks)

    def _raise_if(self, compared: _Compared) -> None:
        if not compared.found:
            return
        device, error = self._device.for_judging(), ""
        try:
            error = "" if device is None else self._judge(compared, device)
        except (FailedRunError, UserError) as failure:
            error = f"gradients differ from those of one device, which cannot run again: {failure}"
        error = self._agreement.gather(error)[0]
        if error:
            raise UserError(error)

    def _check_buffers(self, plain: Mapping[str, Tensor], step: int) -> None:
        """Raise if the plan leaves other buffers than one device; say it if no checkpoint has it."""
        forms: dict[str, list[int]] = {n: [t.is_complex(), *t.shape] for n, t in plain.items()}
        forms = self._agreement.gather(forms)[0]
        kinds = (torch.float64, torch.complex128)
        likes = {n: torch.empty(size, dtype=kinds[kind], device="meta") for n, (kind, *size) in forms.items()}
        gives = self.replica == 0 or self._agreement.group is None  # its buffers to all replicas, or to none
        left = {name: buffer for name, buffer in self._left.items() if name in likes}
        others = [name for name, buffer in left.items() if buffer.shape != likes[name].shape]
        kept = [OwnedSlice(whole_slice(name, t), t) for name, t in left.items() if name not in others]
        comparison = Comparison(kept if gives else [])
        share_gradients(plain, likes, self._agreement.group, self._mesh.device, comparison.take)
        differences = comparison.differences(self._agreement.group)
        others += [each.name for each in differences if not each.relative <= TOLERANCES[self._type]]
        wrong = set(chain(*self._agreement.gather(others)))
        temporary = self._reference.form.temporary.items()
        lasting = sorted(wrong - {n for n, each in temporary if each.numel() > 1 or each.is_floating_point()})
        if lasting:
            raise UserError(
                f"plan '{self._mesh.plan}': step {step + 1} would leave something else than one device in a "
                f"buffer ({', '.join(lasting[:3])}), which an evaluation may read: each microbatch changes "
                "it again, or each replica by its own samples; compute it of echelon.gather_samples, use "
                "data=1 and microbatches=1, count in an attribute (self.calls += 1), or register it with "
                "persistent=False, if it is no count and may differ; audit='off' trains without a comparison"
            )
        self._warn_once(wrong, _LEFT)

    def _warn_once(self, names: set[str], sentence: str) -> None:
        new = sorted(names - self._told)
        self._told |= names
        if new and self._agreement.rank == 0:
            warnings.warn(f"plan '{self._mesh.plan}': {sentence.format(', '.join(new))}", stacklevel=6)

    def _judge(self, compared: _Compared, device: OneDevice) -> str:
        """Return an error, if neither rounding nor other draws explain why gradients differ; that of rank 0
        counts."""
        samples, run, result, found, _ = compared
        eps = torch.finfo(self._type).eps
        others = [(TIMES_ROUNDING, run._replace(rounding=eps, draw=draw)) for draw in range(_DRAWS)]
        others += [(TIMES_DRAWS, run._replace(is_second=True))] if result.has_drawn else []
        if device.whole is not None and eps > torch.finfo(torch.float32).eps:
            others += [(TIMES_PRECISE, run._replace(is_precise=True))]
        names = [each.name for each in found]
        kept, beyond = KeptGradients(device.group), found
        device.gradients(run, kept.take, names)
        for times, other in others:
            comparison = kept.comparison()
            try:
                device.gradients(other, comparison.take, names)
            except FailedRunError:  # a module that takes 16 bits alone
                if other.is_precise:
                    continue
                raise
            explained = {each.name: times * each.distance for each in comparison.differences(device.group)}
            beyond = [each for each in beyond if not each.distance <= explained[each.name]]
            if not beyond:
                return ""
        return explain(beyond, run, result, samples, device, self._mesh.plan)

    def _rehearse(
        self, choose: Choose, step: int, *, training: bool, is_small: bool = True
    ) -> tuple[AuditBatch, Run, Result]:
        """Choose samples, and let one device compute them. A model that does not take a small part of a
        microbatch is given whole ones; one that does not take all samples at once, some."""
        is_small = is_small and not self._takes_all
        samples = choose(is_small=is_small, repeats=self._repeats and not self._takes_all)
        if samples is None:
            raise CannotCompareError("a replica has no sample", is_final=False)
        # A worker divides its loss by the samples of all: functions of gradients that are not linear see it.
        scale = float(self._update.loss_scale) / workers_per_update(self._mesh.plan)
        run = Run(samples.whole, step, training=training, scale=scale)
        part = Run(samples.part(0), step) if len(samples.bounds) > 1 else None
        try:
            result = self._device.rehearse(run, part, part_tells=not self._takes_all)
        except FailedRunError:
            if not (is_small or self._takes_all):
                raise
            self._takes_all = False  # there may be too many
            return self._rehearse(choose, step, training=training, is_small=False)
        if result.gathers and self._runner.replicas.error:
            raise UserError(self._runner.replicas.error)
        self._runner.feed.fixed_count |= result.gathers  # each replica has as many samples in every step
        sees_all = result.gathers or result.changes_buffers or self._numbers.goes_on(result.counted_by)
        if self._repeats and sees_all:
            self._repeats = False
            return self._rehearse(choose, step, training=training, is_small=is_small)
        if not result.counted:
            raise CannotCompareError("the loss counts none of its samples", is_final=False)
        return samples, run, result

    # The plan.

    def _run_plan(
        self, samples: AuditBatch, step: int, generators: GeneratorStates | None, *, training: bool
    ) -> tuple[list[OwnedSlice], float]:
        """Return this rank's gradients as boxes of whole ones, and what makes them those of the mean."""
        local, units, device = self._local, self._update.units, self._mesh.device
        captured: dict[Tensor, Tensor] = {}
        with ExitStack() as stack:
            loss = self._runner.user_loss
            stack.enter_context(without_side_effects(local.modules, self._modules, device, loss))
            if not training:
                for module in self._modules:
                    module.training = False
            buffers = ChangedBuffers(self._reference.form.buffers)
            self._numbers.start()
            if units is not None:  # else gradients are gone when their unit is updated
                stack.enter_context(units.rehearse(partial(_capture, captured)))
            scope = partial(self._scope, samples, step, generators)
            tally = self._runner.differentiate(samples.local, step, scope, num_samples(samples.whole))
            if units is not None:
                units.finish_passes()
            self._left = buffers.now()
            self._numbers.stop()
        if self._agreement.group is not None:
            with self._agreement.group.ledger.about("checks"):
                self._agreement.group.all_reduce(tally)
        _, count, weighted = tally[:3].tolist()
        return self._owned(captured), weighted / count / count if count else 0.0

    def _scope(
        self, samples: AuditBatch, step: int, generators: GeneratorStates | None, number: int
    ) -> AbstractContextManager[None]:
        """Place a microbatch among the samples of one device, whose first draws it makes too."""
        if generators is not None:
            generators.restore()
        place = samples.places[number % len(samples.places)]
        return self._scopes.at_place(step, place, samples.per_part)

    def _owned(self, captured: Mapping[Tensor, Tensor]) -> list[OwnedSlice]:
        owned = []
        for sharing in self._local.sharings:
            for each in sharing.summed_parameters():
                gradient = captured.get(each.tensor, each.tensor.grad)
                if gradient is not None:
                    dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
                    boxes = own_run(dense, sharing.slices(each))
                    owned += [box for own in boxes for box in self._state.in_whole(own)]
        return owned


def _capture(captured: dict[Tensor, Tensor], local: Sequence[LocalParameter]) -> None:
    captured |= {each.tensor: each.tensor.grad.clone() for each in local if each.tensor.grad is not None}
