"""The entry of the audit that compares a model that runs layer by layer with its own forward."""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.assembly import Assembly
from echelon.audit import AuditResult, held, skipped
from echelon.audit.agreement import RankAgreement
from echelon.audit.loss_parts import LossRefusedError, as_numbers, call_loss
from echelon.audit.own_forward import (
    Measure,
    find_difference,
    measure_output,
    message,
    with_tensors,
)
from echelon.audit.samples import map_tensors, rounding
from echelon.context_parallel import take
from echelon.engine.batch import Loss, cast, num_samples, take_part
from echelon.engine.free_memory import free_bytes
from echelon.engine.layer_sharding import LayerSharding
from echelon.engine.missing_operation import missing_operation
from echelon.engine.neighbours import share_samples
from echelon.engine.padding import has_positions
from echelon.engine.sample_audit import batch_norms
from echelon.engine.samples import Scopes
from echelon.engine.trial import Outcome, Trial, TrialForward
from echelon.engine.upload import to_device
from echelon.errors import UserError
from echelon.generators import GeneratorStates
from echelon.inputs import call
from echelon.mesh import Mesh
from echelon.ownership import VALUE, OwnedSlice
from echelon.precision import DTYPES
from echelon.quantities import show_bytes
from echelon.runtime.power_iteration import iterated_modules, no_iteration

NAME = "own forward"

_MOST = 2**29  # bytes: a plan is also there so that no rank ever holds a large model whole


@final
class ForwardAudit:
    """Runs the model's own forward on rank 0, which gets whole weights for it. `speaks`: whether what comes
    out of the last stage here is compared with it."""

    def __init__(
        self,
        trials: TrialForward,
        mesh: Mesh,
        layers: LayerSharding,
        scopes: Scopes,
        agreement: RankAgreement,
        model: nn.Module,
        skeleton: nn.Module | str,
        owned: Callable[[], list[OwnedSlice]],
        *,
        speaks: bool,
    ) -> None:
        self._trials, self._mesh, self._layers, self._scopes = trials, mesh, layers, scopes
        self._agreement, self._model, self._skeleton, self._owned = agreement, model, skeleton, owned
        self._speaks = speaks

    def __call__(self, batch: Any) -> AuditResult:
        if self._agreement.least(num_samples(batch))[0] == 0:
            return skipped(NAME, "a replica has no sample", is_final=False)
        reason = self._agreement.gather(self._reason_not())[0]
        if reason:
            return skipped(NAME, reason)
        sample = share_samples(take_part(batch, 0, num_samples(batch)), self._mesh, self._agreement)
        scope = partial(self._scopes.at_sample(0, 1), 0)
        training, failure, outcome = self._by_layers(Trial(sample, scope))
        if failure:
            missing = missing_operation(failure, self._mesh.plan, self._mesh.device)
            if missing is not None:  # on every rank, before a stage waits for one that cannot run
                raise missing
            return skipped(NAME, f"the model does not take one sample: {failure}")
        by_layers = None if outcome is None else self._report(outcome, self._layers.loss)
        own = self._run_own(Trial(sample, scope), training=training)
        reports = self._agreement.gather(by_layers if self._speaks else None)
        own = self._agreement.gather(own)[0]
        if isinstance(own, str):
            return skipped(NAME, own)
        difference = _compare([report for report in reports if report is not None], own)
        if difference:
            raise UserError(message(difference, str(self._mesh.plan)))  # the same on every rank
        notes = ["no gradients were compared"]
        notes += [] if training else ["in evaluation mode: the forward draws random numbers"]
        notes += [f"without the loss: {each}" for each in _refusals([*reports, own])[:1]]
        return held(NAME, "; ".join(notes))

    def _reason_not(self) -> str:
        """Why rank 0 cannot run the model's own forward; empty if it can."""
        if self._mesh.plan.sync == "async":
            return "asynchronous workers do not put a model together"
        if isinstance(self._skeleton, str):
            return self._skeleton
        needed = 2 * sum(p.numel() * p.element_size() for p in self._skeleton.parameters())
        allowed = min(free_bytes(self._mesh.device), _MOST)
        if needed <= allowed:
            return ""
        return f"the whole model needs {show_bytes(needed)}, and rank 0 may take {show_bytes(allowed)} for it"

    def _by_layers(self, trial: Trial) -> tuple[bool, str, Outcome | None]:
        """One sample through the stages: whether in training mode, why not, and what came out here."""
        norms, others = batch_norms(self._model)
        evaluating = [self._model.get_submodule(name) for name in [*norms, *others]]
        for training in (True, False):
            run = self._trials.run([trial], evaluating=evaluating, training=training)
            has_failed, has_drawn = self._agreement.any(bool(run.failure), run.has_drawn)
            if has_failed:
                failures = [text for text in self._agreement.gather(run.failure) if text]
                return training, failures[0], None
            if not has_drawn:
                break
        return training, "", run.outcomes[0]

    # The model's own forward.

    def _run_own(self, trial: Trial, *, training: bool) -> dict[str, Any] | str | None:
        """All ranks give their parts of the weights; rank 0 runs, and reports."""
        with self._mesh.ledger.only_about("checks"):
            owned = [each for each in self._owned() if each.slice.part == VALUE]
            assembly = Assembly(owned, self._mesh.group("all"), self._mesh.device)
            whole = {key[0]: assembly.tensor(key, to=0) for key in sorted(assembly)}
        if self._mesh.rank != 0 or isinstance(self._skeleton, str):
            return None
        tensors = {name: tensor for name, tensor in whole.items() if tensor is not None}
        generators = GeneratorStates(self._mesh.device)
        try:
            with torch.no_grad(), with_tensors(self._skeleton, tensors), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._set_modes(self._skeleton, training=training)
                outcome = self._call_own(self._skeleton, trial)
                return self._report(outcome, self._layers.whole_loss, is_own=True)
        except Exception as error:
            return f"its forward cannot be run by itself: {type(error).__name__}: {error}".splitlines()[0]
        finally:
            generators.restore()

    def _call_own(self, skeleton: nn.Module, trial: Trial) -> Outcome:
        inputs, targets = map_tensors(Tensor.clone, to_device(trial.part, self._mesh.device))
        with trial.scope(), no_iteration(iterated_modules(skeleton)):
            output = call(skeleton, cast(inputs, DTYPES[self._mesh.plan.precision]))
        return Outcome(output, targets)

    def _set_modes(self, skeleton: nn.Module, *, training: bool) -> None:
        modes = {name: module.training for name, module in self._model.named_modules()}
        running = {name for names in batch_norms(self._model) for name in names}
        for name, module in skeleton.named_modules():
            module.training = training and modes.get(name, True) and name not in running

    def _report(self, outcome: Outcome, loss: Loss, *, is_own: bool = False) -> dict[str, Any]:
        """What ranks compare, as plain values: the output of each rank along `context`, and the loss."""
        context, output = self._mesh.group("context"), outcome.output
        parts = {rank: _part(output, rank, context.size) for rank in range(context.size)}
        outputs = parts if is_own else {context.rank: output}
        measures = {} if self._layers.has_split_logits else {r: measure_output(o) for r, o in outputs.items()}
        tolerance = max((rounding(leaf.dtype) for leaf in _tensors(output)), default=0.0)
        report = {"loss": None, "outputs": measures, "tolerance": tolerance}
        try:
            return report | {"loss": self._sums(outcome, loss)}
        except LossRefusedError as refusal:  # it may know only what layers return
            return report | {"refusal": str(refusal)}

    def _sums(self, outcome: Outcome, loss: Loss) -> list[float] | None:
        """The total and count of a loss; none of one that may not add up over the parts of a sequence, which
        the first microbatch finds out."""
        if self._layers.loss_check is not None:
            return None
        with torch.no_grad():
            result = call_loss(loss, outcome.output, outcome.targets)
        total, count = as_numbers(result)
        share = 1.0 if isinstance(result, tuple) else outcome.share
        return [total * share, count * share]


def _part(output: Any, rank: int, ranks: int) -> Any:
    """What a rank along `context` has of an output; nothing of one that is padded to be shared."""
    if ranks == 1:
        return output
    leaves = [leaf for leaf in _tensors(output) if has_positions(leaf)]
    if any(leaf.shape[1] % (2 * ranks) for leaf in leaves):
        return None
    return map_tensors(lambda leaf: take(leaf, rank, ranks) if has_positions(leaf) else leaf, output)


def _compare(by_layers: Sequence[dict[str, Any]], own: dict[str, Any]) -> str:
    """What differs, in words. `by_layers`: of each rank along `context`."""
    for report in by_layers:
        for rank, outputs in report["outputs"].items():
            measures, own_measures = (
                {place: Measure(*values) for place, values in each.items()}
                for each in (outputs, own["outputs"].get(rank, {}))
            )
            difference = find_difference(measures, own_measures)
            if difference:
                return difference
    losses = [report["loss"] for report in by_layers]
    if own["loss"] is None or None in losses:
        return ""
    total, count = (sum(loss[place] for loss in losses) for place in range(2))
    mean, own_mean = (t / c if c else 0.0 for t, c in ((total, count), own["loss"]))
    tolerance = max(own["tolerance"], *(report["tolerance"] for report in by_layers))
    if abs(mean - own_mean) <= tolerance * max(abs(mean), abs(own_mean)) or not math.isfinite(own_mean):
        return ""
    return f"the loss is {mean:.6g} by layers and {own_mean:.6g} by its forward"


def _refusals(reports: Sequence[dict[str, Any] | None]) -> list[str]:
    """What the loss raised where it could not be called."""
    return [report["refusal"] for report in reports if report is not None and "refusal" in report]


def _tensors(structure: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(structure) if isinstance(leaf, Tensor)]
