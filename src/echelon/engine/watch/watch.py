"""The engine watches what it owns: what the user does to model and optimizer between two steps.

    before a step                                      it is
    a weight has another version or address            taken over by masters, shards and host copies
    a weight that this rank sees a part of was changed refused
    other hooks, children, Parameter objects, forwards refused, unless the plan calls the model as one device
    a module has another training mode                 respected
    gradients that wait for an update are others       refused
    the optimizer has other parameters, or is coupled  refused

All of it is read from Python objects: no tensor and no device. Ranks decide alike, since they run the same
script; where what they did by hand differs, the sums of the step show it, and none of them updates.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn

from echelon.collectives.agreement import fingerprint
from echelon.collectives.mesh import Mesh
from echelon.engine.watch.outside import (
    COPIED_GRADIENT,
    Inside,
    adds_unseen,
    calls_as_one_device,
    changed_gradient_error,
    changed_weight_error,
    lost_gradient,
    needs_idle,
    part_of_weights,
    updates_itself,
    waiting_gradient,
)
from echelon.engine.watch.snapshots import GradientWatch, Structure, WeightWatch
from echelon.errors import UserError
from echelon.parallel.data.batch_norm import check_worker_norms
from echelon.parallel.data.sharing import Problem
from echelon.parallel.data.zero.weight_access import Idle
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.stage import LocalStages
from echelon.plan import Plan
from echelon.update.optim.local import FirstStates
from echelon.update.optim.needs import inner_optimizers, need_of
from echelon.update.precision.optimizer_call import has_step_hooks
from echelon.update.precision.stepper import has_other_step
from echelon.update.update import Update

_DIGESTS = 1 << 20  # their weighted sums over ranks stay exact in float64


@final
class Watch:
    """Watches one engine: `step` is around each of its steps, `own_work` around what else it does."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        local: LocalStages,
        layers: LayerSharding,
        update: Update,
        inside: Inside,
    ) -> None:
        self._plan, self._model, self._update, self.inside = mesh.plan, model, update, inside
        self._layers, self._is_plain, self._sharings = layers, False, local.sharings
        names = {module: name or type(model).__name__ for name, module in model.named_modules()}
        made = [each for stage in local.modules for each in stage.modules() if each not in names]
        self._made = list(dict.fromkeys(made))  # on the fly: they have the mode of the model
        self._structure = Structure(names | {each: type(each).__name__ for each in self._made})
        parameters = {name: p for sharing in local.sharings for name, p in sharing.parameter_set.trained}
        self._weights = WeightWatch(parameters)
        self._trained = {p: name for name, p in parameters.items()}
        self._optimizer = OptimizerWatch(update.optimizer, mesh.plan, inside)
        self._changed: dict[str, nn.Parameter] = {}  # found before the engine itself changed weights
        self._gradients = GradientWatch(parameters.values() if adds_unseen(mesh.plan) else ())
        self._idle, self._updated = Idle(lost_gradient(mesh.plan)), Idle(COPIED_GRADIENT)
        if needs_idle(mesh.plan):
            for name, parameter in parameters.items():
                self._idle.watch(name, parameter, part_of_weights(mesh.plan, bool(layers.shards_of(name))))
            for parameter in self._optimizer.parameters - self._trained.keys():
                self._updated.watch("what the optimizer updates in place of a weight", parameter)
        if not model.training:
            model.train()
        self._modes = self._read_modes()
        self._begin_idle()

    # What an engine calls.

    @contextmanager
    def step(self, *, is_empty: bool) -> Iterator[UserError | None]:
        """Around a step, which gets what this rank refuses, and other ranks may not see. `is_empty`: nothing
        is under way that began with weights of before."""
        refusal = self._check(is_empty=is_empty)
        if refusal is None:
            with self._work():
                yield None
            return
        # Other ranks do not see it: the sums of this step tell them, and it changes nothing.
        self._update.refuse_next()
        try:
            with self._work(records_structure=False, records_weights=False):
                yield refusal
        except UserError as error:
            raise refusal from error
        finally:
            self._update.refuse_next(refuses=False)  # where no sums were made

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Around what else reads or changes weights: a load, or an evaluation. What the user has
        changed before is seen; whether all ranks have changed the same, the next step compares."""
        if self.inside:
            yield
            return
        self.check_not_plain()
        self._changed |= self._find_changed()
        is_refused = bool(self._structure.changes()) or self._optimizer.is_changed
        with self._work(records_structure=not is_refused):
            if self._changed and self._change_error(is_empty=True) is None:
                self._update.take_over(set(self._changed.values()), 0.0)
            try:
                yield
            except UserError as error:
                if str(error) == Problem.LOST_CHANGE.value:  # every rank is told: the next step is right
                    self.forget()
                raise

    @contextmanager
    def other_weights(self, show: Callable[[], None], hide: Callable[[bool], None]) -> Iterator[None]:
        """Inside, weights have values for readers alone: after `show`, until `hide`, which is told whether
        all ranks are there. What the user has changed before waits for the next step."""
        with self.own_work():
            show()
        before, self._changed = self._changed, {}
        is_everyone = False
        try:
            yield
            is_everyone = True
        except UserError:  # on every rank
            is_everyone = True
            raise
        finally:
            lost = self._changed | self._find_changed()
            self._changed = before
            with self._work():
                hide(is_everyone)
        if lost:
            raise UserError(
                f"{next(iter(lost))}: changed by hand inside `with engine.averaged()`, where weights are "
                "their averages, and the change is lost; change weights outside of the block"
            )

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Around code of the user that has the model without the engine."""
        self._is_plain = True
        try:
            yield
        finally:
            self._is_plain = False

    def check_not_plain(self) -> None:
        """Refuse a call of the engine inside of `plain`."""
        if self._is_plain:
            raise UserError(
                "a call of the engine inside of `with engine.whole() as model:`, where the model is plain; "
                "leave that block first, or call the model itself"
            )

    def hide_gradients(self, *, hidden: bool) -> None:
        """Until an update has summed gradients over ranks, `.grad` is one rank's part: to use it raises."""
        waiting = waiting_gradient(self._plan) if hidden else None
        self._idle.lost_gradient = waiting or lost_gradient(self._plan)
        self._idle.keeps_gradients, self._updated.keeps_gradients = waiting is not None, hidden
        self._gradients.is_on = hidden

    def forget(self) -> None:
        """Drop what the user has changed: a load has replaced all weights."""
        self._changed.clear()

    def close(self) -> None:
        self._end_idle()
        self._optimizer.close()

    # Before and after.

    def _work(self, *, records_structure: bool = True, records_weights: bool = True) -> "_Work":
        return _Work(self, records_structure, records_weights)

    def begin_work(self) -> None:
        self._gradients.look()
        self._end_idle()
        self.inside.__enter__()

    def end_work(self, *, records_structure: bool, records_weights: bool) -> None:
        self.inside.__exit__()
        if records_structure:
            self._structure.record()
            self._optimizer.record()
        if records_weights:
            self._weights.record()
        self._gradients.record()
        self._begin_idle()

    def _begin_idle(self) -> None:
        self._idle.begin()
        self._updated.begin()

    def _end_idle(self) -> None:
        self._idle.end()
        self._updated.end()

    def _check(self, *, is_empty: bool) -> UserError | None:
        """Raise what ranks refuse alike; return what other ranks may not see."""
        errors = (sharing.unfrozen_error() for sharing in self._sharings)
        refusal = self._check_structure() or next(filter(None, errors), None)
        self._optimizer.check()
        if self._gradients.look():
            raise UserError(changed_gradient_error(self._plan))
        self._changed |= self._find_changed()
        changed = self._changed
        if changed:
            self._weights.check_forms(changed)
            error = self._change_error(is_empty=is_empty)
            refusal = UserError(error) if error is not None else refusal
        if refusal is not None:
            if self._decides_alone:
                raise refusal
            return refusal
        modes = self._read_modes()
        for module in self._made:
            module.training = self._model.training
        if changed or modes != self._modes:
            if self._plan.sync == "async":
                check_worker_norms([self._model], self._plan)
            self._modes = modes
            self._update.take_over(set(changed.values()), _digest(changed, modes))
        self._changed = {}
        return None

    def _change_error(self, *, is_empty: bool) -> str | None:
        split = [name for name in self._changed if self._layers.shards_of(name)]
        return changed_weight_error(self._plan, list(self._changed), split, is_empty=is_empty)

    @property
    def _decides_alone(self) -> bool:
        """Return whether other ranks see the same, or this one cannot wait for them before the update."""
        plan = self._plan
        is_flushed = plan.flushes and plan.update == "step"
        return plan.stages == 1 or not is_flushed

    def _check_structure(self) -> UserError | None:
        changes = self._structure.changes()
        if not changes:
            return None
        respected = ("hooks", "weight hooks", "forwards") if calls_as_one_device(self._plan) else ()
        refused = [change for change in changes if change.kind not in respected]
        if not refused:
            return None
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        error = UserError(
            f"{refused[0].text}{more} since parallelize or the last step: plan '{self._plan}' was made for "
            "the model as it was then, and the audit has compared that one; call engine.close(), change the "
            "model, and make another engine with parallelize. To change the values of a weight, write into "
            "it: with torch.no_grad(): weight.copy_(…)"
        )
        if any(change.kind != "weight hooks" for change in refused):
            raise error  # all ranks have all modules
        return error

    def _find_changed(self) -> dict[str, nn.Parameter]:
        on_the_way = {each.name: each.parameter for each in self._update.changed()}
        return self._weights.changed() | on_the_way

    def _read_modes(self) -> list[bool]:
        return [module.training for module in self._structure.modules]


@final
class _Work:
    """Around what the engine does itself."""

    def __init__(self, watch: Watch, records_structure: bool, records_weights: bool) -> None:
        self._watch, self._records = watch, (records_structure, records_weights)

    def __enter__(self) -> None:
        self._watch.begin_work()

    def __exit__(self, *_: object) -> None:
        structure, weights = self._records
        self._watch.end_work(records_structure=structure, records_weights=weights)


def _digest(changed: Mapping[str, nn.Parameter], modes: list[bool]) -> int:
    """Return a number of all that was done by hand; reads the weights that were changed."""
    values = [(name, fingerprint(parameter)) for name, parameter in sorted(changed.items())]
    return 1 + zlib.crc32(repr((values, modes)).encode()) % (_DIGESTS - 1)


# The user's optimizer: the same parameters, and no call that updates them by hand.


@final
class OptimizerWatch:
    """Compares the groups of an optimizer, and refuses its `step` outside of the engine's."""

    def __init__(self, optimizer: torch.optim.Optimizer, plan: Plan, inside: Inside) -> None:
        self._optimizer, self._plan, self._inside = optimizer, plan, inside
        self._handles: list[Any] = []
        self._state = optimizer.state
        if not updates_itself(plan):
            for each in dict.fromkeys([optimizer, *inner_optimizers(optimizer)]):
                if hasattr(each, "_optimizer_step_pre_hooks"):
                    self._handles.append(each.register_step_pre_hook(self._refuse_call))
        self.record()

    def record(self) -> None:
        self._groups = self._read()

    def check(self) -> None:
        check_coupling(self._optimizer, self._plan)
        if self.is_changed:
            raise UserError(
                f"the parameters of the optimizer's groups were changed since parallelize or the last step: "
                f"plan '{self._plan}' has put parts, masters or copies in their place, and knows no others; "
                "give all groups to the optimizer in the function that parallelize calls"
            )
        if isinstance(self._state, FirstStates) and self._optimizer.state is not self._state:
            raise UserError(
                f"optimizer.state was replaced by hand: with plan '{self._plan}' parts, masters or copies "
                "have their state in the one of before, and an update may have been under way; change that "
                "one (optimizer.state.clear(), optimizer.state.values()), or call optimizer.load_state_dict"
            )

    @property
    def parameters(self) -> set[nn.Parameter]:
        """Return all that it updates here."""
        optimizers = dict.fromkeys([self._optimizer, *inner_optimizers(self._optimizer)])
        return {p for each in optimizers for group in each.param_groups for p in group["params"]}

    @property
    def is_changed(self) -> bool:
        """Return whether its groups have other parameters."""
        return self._read() != self._groups

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _read(self) -> list[list[int]]:
        groups: Sequence[dict[str, Any]] = self._optimizer.param_groups
        return [list(map(id, group["params"])) for group in groups]

    def _refuse_call(self, *_: object) -> None:
        if not self._inside:
            raise UserError(
                f"optimizer.step() outside of engine.step(): with plan '{self._plan}' gradients are summed "
                "over ranks, scaled and brought to what the optimizer updates in engine.step(batch) alone, "
                "which makes the update too; drop backward() and optimizer.step() from the loop, or write "
                "engine.backward(loss) and engine.update(). See docs/loops.md"
            )


def check_coupling(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuse an optimizer whose update of one parameter may depend on others, where a rank has not all of
    them: one with hooks or another `step`, unless it says what it needs, or one that says nothing."""
    if not (plan.zero or plan.tensor > 1 or plan.expert > 1 or plan.stages > 1):
        return
    name = type(optimizer).__name__
    for each in dict.fromkeys([optimizer, *inner_optimizers(optimizer)]):
        says = getattr(each, "needs", None) is not None and not hasattr(each, "optimizers")
        if not says and (has_other_step(each) or has_step_hooks(each)):
            way = "a replaced step()" if has_other_step(each) else "a step hook"
            raise UserError(
                f"optimizer {name} with plan '{plan}' has {way}: it may look at all parameters at once, as a "
                "clip of their norm does, and a rank has a part of them; clip with parallelize(clip=…), drop "
                'it, or, if it looks at no more than single elements, set optimizer.needs = "element"'
            )
    if plan.stages > 1 and need_of(optimizer) is None:
        raise UserError(
            f"optimizer {name} with plan '{plan}': nobody knows whether it looks at several parameters at "
            'once, and a rank has those of its own stage; set `needs = "element"` or `needs = "whole"` on '
            "its class if it looks at one parameter at a time, or use pipeline=1"
        )
