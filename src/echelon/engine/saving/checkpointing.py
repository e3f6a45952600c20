"""`engine.save` and `engine.load`: what all ranks call together; a load goes on whatever plan saved.

All goes by names and boxes of whole tensors. First everything is compared with what the engine has; if
anything does not fit, nothing changes. Then each rank reads what it holds:

    weights       `Sharing.first_weights`, as a deferred start fills them; from the master where that is finer
    buffers       whole
    optimizer     each local parameter asks for its boxes of every part (`Stepper.load`)
    numbers       counters of steps, loss scale, normaliser
"""

import difflib
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.collectives.agreement import check_on_every_rank
from echelon.engine.saving.engine_state import (
    EXTRA_STATE,
    JSON,
    LEARNED,
    PARAMETERS,
    RANDOM,
    TEMPORARY,
    EngineState,
    extra_state_modules,
    restore_learned_order,
)
from echelon.engine.step.runner import StepRunner
from echelon.errors import UserError, raise_errors
from echelon.parallel.observer import StepObserver
from echelon.state.bounded_json import parse_json
from echelon.state.checkpoint.manifest import Manifest
from echelon.state.checkpoint.rank_save import SaveOptions
from echelon.state.checkpoint.save import Saver
from echelon.state.checkpoint.saved import SavedState, number_errors, numbers_of
from echelon.state.ownership import AVERAGE, MASTER, VALUE, OwnedSlice, Slice, StateNames
from echelon.state.weight_files.layout import whole
from echelon.update.optim.optimizer_state import owner_of, state_forms
from echelon.update.update import Update


@final
class Loading(NamedTuple):
    """A checkpoint, and the engine that it is loaded into: `check`, `read`, `restore`, in this order.
    `optimizer`: with the state of its optimizer. `options`: with the options of its groups."""

    saved: SavedState
    state: EngineState
    optimizer: bool
    options: bool

    def check(self) -> None:
        """Raise, on every rank, all reasons why the engine cannot take the checkpoint. Changes nothing."""
        values = [*self.state.values(), *self.state.temporary_buffers()]
        errors = [*name_errors(self.saved, self.state.names), *value_errors(self.saved, values)]
        errors += number_errors(self.saved.manifest.numbers)
        if self.optimizer:
            errors += optimizer_errors(self.saved, self.state.update)
        if self.options:
            errors += option_errors(self.saved.manifest.groups, self.state.update)
        found = dict.fromkeys(error for of_rank in self.state.gather(errors) for error in of_rank)
        raise_errors(f"checkpoint {self.saved.path} for this engine", list(found))
        self._compare_seeds()

    def _compare_seeds(self) -> None:
        """Warn, once, if random numbers will not go on as they were."""
        seed = self.state.seed
        saved = self.saved.manifest.numbers.get("seed", seed)
        if saved != seed and self.state.mesh.rank == 0:
            warnings.warn(
                f"checkpoint {self.saved.path} was saved with seed={_shown(saved)}, and this engine has "
                f"seed={_shown(seed)}: random numbers, as those of dropout, will be others than if the "
                "training had gone on",
                stacklevel=2,
            )

    def read(self) -> None:
        """Each rank reads what it holds; then those that hold less than they use exchange it."""
        check_on_every_rank(self._read)
        for sharing in dict.fromkeys(self.state.local.sharings):
            sharing.share_first_weights()

    @torch.no_grad()
    def _read(self) -> None:
        for sharing in dict.fromkeys(self.state.local.sharings):
            for each in sharing.first_weights():
                boxes = self.state.in_whole(each)
                if sum(box.tensor.numel() for box in boxes) < each.tensor.numel():
                    each.tensor.zero_()  # what is left of it is padding
                for box in boxes:
                    part = self.saved.value_part(box.slice.name, box.tensor.dtype)
                    self.saved.read(box.slice._replace(part=part), box.tensor)
        for each in (*self.state.buffers(), *self.state.temporary_buffers()):
            is_saved = each.slice.part in self.saved.parts(each.slice.name)
            if is_saved and not each.slice.name.endswith(EXTRA_STATE):
                self.saved.read(each.slice, each.tensor)
        for name, module in extra_state_modules(self.state.module).items():
            is_plain = JSON in self.saved.parts(name)
            module.set_extra_state(self._plain(name, JSON) if is_plain else self._whole(name, VALUE))
        self.state.update.load(self.saved, self.state.in_whole, state=self.optimizer)

    def restore(self, runner: StepRunner) -> None:
        """Give the engine what is no tensor of its own: options, counters, and, under the plan that saved
        them, what the first step has shown and random states."""
        check_on_every_rank(lambda: self._restore(runner))  # workers go on when the server has its state

    def _restore(self, runner: StepRunner) -> None:
        state, saved, plan = self.state, self.saved.manifest, self.state.mesh.plan
        if self.options:
            apply_options(saved.groups, state.update)
        state.update.restore(saved.numbers)
        numbers = numbers_of(saved.numbers, state.worker, plan.data)
        runner.restore(numbers)
        state.counter.restore(numbers)
        if (saved.plan, saved.ranks) == (str(plan), plan.ranks):
            self._restore_own(state.mesh.rank, state.mesh.device)

    def _restore_own(self, rank: int, device: torch.device) -> None:
        """Random states are there if nothing was seeded."""
        if f"rank {rank}" in self.saved.parts(LEARNED):
            with self._refusing_strangers(LEARNED):
                restore_learned_order(self.state.local, self._plain(LEARNED, f"rank {rank}"))
        parts = self.saved.parts(RANDOM)
        with self._refusing_strangers(RANDOM):
            if f"cpu of rank {rank}" in parts:
                torch.set_rng_state(self._whole(RANDOM, f"cpu of rank {rank}"))
            if f"cuda of rank {rank}" in parts and device.type == "cuda":
                torch.cuda.set_rng_state(self._whole(RANDOM, f"cuda of rank {rank}"), device)

    def _plain(self, name: str, part: str) -> Any:
        """Read a small tensor of bytes that are JSON."""
        with self._refusing_strangers(name):
            return parse_json(self._whole(name, part).numpy().tobytes())

    @contextmanager
    def _refusing_strangers(self, name: str) -> Iterator[None]:
        """Turn errors over what no engine has saved into errors of the checkpoint."""
        try:
            yield
        except UserError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            reason = str(error).partition("\n")[0][:200]
            raise UserError(f"{self.saved.path}: {name} is not what an engine saves: {reason}") from error

    def _whole(self, name: str, part: str) -> Tensor:
        """Read all of a small tensor, into host memory."""
        saved = self.saved.parts(name)[part]
        out = torch.empty(saved.shape, dtype=saved.dtype)
        self.saved.read(Slice(name, part, saved.shape, *whole(saved.shape)), out)
        return out


def _shown(seed: float) -> str:
    return "None" if seed == -1 else str(seed)


# The options of an optimizer's groups (lr, weight_decay, …), from a checkpoint, as load_state_dict has
# them.

# How an optimizer works on a device is not a part of what it computes.
_LOCAL = frozenset({PARAMETERS, "params", "param_names", "fused", "foreach", "capturable", "differentiable"})
Groups = Sequence[Mapping[str, Any]]


def option_errors(saved: Groups, update: Update) -> list[str]:
    """Say why groups here cannot have the options of those that were saved: parameters of one group were in
    several, of different options."""
    errors = []
    for number, names in enumerate(_names_of_groups(update)):
        found = _matching(saved, names)
        differing = sorted(
            {key for each in found for key in _options(each) if each.get(key) != found[0].get(key)}
        )
        if differing:
            errors.append(
                f"group {number} of the optimizer has parameters that were in {len(found)} groups, with "
                f"different {', '.join(differing)} (as {min(names)}); make the same groups, or keep the "
                "options of now: load(path, options=False)"
            )
    return errors


def apply_options(saved: Groups, update: Update) -> None:
    """Give each group the options that its parameters had."""
    for group, names in zip(update.optimizer.param_groups, _names_of_groups(update), strict=True):
        for options in _matching(saved, names)[:1]:
            for key, value in _options(options).items():
                if key in group or key == "initial_lr":
                    group[key] = _like(group.get(key), value)


def _names_of_groups(update: Update) -> list[set[str]]:
    names: dict[nn.Parameter, str] = {tensor: name for name, tensor in update.updated_tensors()}
    groups = update.optimizer.param_groups
    return [{names[p] for p in group["params"] if p in names} for group in groups]


def _matching(saved: Groups, names: set[str]) -> list[Mapping[str, Any]]:
    return [group for group in saved if names.intersection(group.get(PARAMETERS, ()))]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _LOCAL}


def _like(now: Any, value: Any) -> Any:
    """Give a value from JSON the type of the one of now: JSON has no tuples and no tensors."""
    if isinstance(now, Tensor):
        return now.fill_(value)
    return tuple(value) if isinstance(now, tuple) and isinstance(value, list) else value


# What a checkpoint has, compared with what an engine needs: names, shapes, types, the optimizer's state.

_MOST = 20  # names in one list
_KINDS = ("is_floating_point", "is_complex")


def name_errors(saved: SavedState, names: StateNames) -> list[str]:
    """Name tensors that the checkpoint lacks, and those that the model lacks."""
    needed = {*names.parameters.values(), *names.state.values()}
    stored = {
        name
        for name, parts in saved.manifest.tensors.items()
        if parts.keys() - {TEMPORARY} and not name.startswith("(")
    }
    missing, unexpected = sorted(needed - stored), sorted(stored - needed)
    return [
        *_listed(f"{name} is missing in the checkpoint{_hint(name, unexpected)}" for name in missing),
        *_listed(f"{name} is in the checkpoint, and not in the model" for name in unexpected),
    ]


def _hint(name: str, others: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, others, n=1, cutoff=0.6)
    return f", which has {close[0]}" if close else ""


def _listed(errors: Iterable[str]) -> list[str]:
    found = list(errors)
    more = [f"… and {len(found) - _MOST} more like this"] if len(found) > _MOST else []
    return [*found[:_MOST], *more]


def value_errors(saved: SavedState, held: Iterable[OwnedSlice]) -> list[str]:
    """Name weights and buffers of other shapes or kinds of numbers than those that were saved."""
    errors = {}
    for box, dtype in {each.slice: each.tensor.dtype for each in held}.items():
        name, shape = box.name, box.shape
        record = saved.parts(name).get(box.part)
        if record is None or name.endswith(EXTRA_STATE):  # named already, or of any shape
            continue
        if record.shape != shape:
            errors[name] = f"{name} has shape {record.shape} in the checkpoint, and {shape} in the model"
        elif any(getattr(record.dtype, kind) != getattr(dtype, kind) for kind in _KINDS):
            saved_type, own_type = (str(each).removeprefix("torch.") for each in (record.dtype, dtype))
            errors[name] = f"{name} is {saved_type} in the checkpoint, and {own_type} in the model"
    return _listed(errors.values())


def optimizer_errors(saved: SavedState, update: Update) -> list[str]:
    """Name state of another optimizer than the one that is here."""
    by_keys: dict[tuple[tuple[str, ...], tuple[str, ...], str], list[str]] = {}
    forms: dict[object, set[str] | None] = {}
    for name, tensor in update.updated_tensors():
        parts = saved.manifest.tensors.get(name, {}).keys() - {VALUE, MASTER, AVERAGE}
        stored = {*parts, *saved.manifest.state_numbers.get(name, {})}
        if not stored:  # never updated
            continue
        # Statistics have the dims of the whole parameter, of which a flat part may be here.
        inner, group = owner_of(update.optimizer, tensor) or (update.optimizer, None)
        dims = tensor.dim(), len(saved.parts(name)[VALUE].shape)
        place = (id(group), *dims, tensor.dtype, tensor.device)
        if place not in forms:
            made = state_forms(update.optimizer, tensor)
            forms[place] = None if made is None else set(made)
        here = forms[place]
        if here is not None and here != stored:
            key = (tuple(sorted(stored)), tuple(sorted(here)), type(inner).__name__)
            by_keys.setdefault(key, []).append(name)
    return [
        f"the checkpoint has {_and(stored)} of {names[0]}"
        f"{f' and {len(names) - 1} more' if names[1:] else ''}, and the optimizer here, {kind}, keeps "
        f"{_and(here)}; use the optimizer that saved it, or let this one begin: load(path, optimizer=False)"
        for (stored, here, kind), names in by_keys.items()
    ]


def _and(keys: Collection[str]) -> str:
    return ", ".join(keys) or "nothing"


@final
class Checkpointing(StepObserver):
    """Saves the state of one engine, and loads into it. All ranks must make the same calls."""

    def __init__(self, state: EngineState, runner: StepRunner, synchronize: Callable[[], None]) -> None:
        """`synchronize`: brings every rank to the newest weights; raises if the engine cannot go on."""
        self._state, self._runner, self._synchronize = state, runner, synchronize
        mesh = state.mesh
        self.saver = Saver(mesh.group("all"), mesh.device, has_server=mesh.plan.sync == "async")
        runner.observers.add(self)
        self._unfinished_load = ""  # the path of a checkpoint that was loaded in part
        self.num_loads = 0  # those that have begun to change the engine

    # Saving.

    def before_update(self) -> None:
        """A copy that is made behind the passes of this step must be done."""
        self.saver.before_changes()

    def save(
        self, path: str | Path, extra: Mapping[str, Any], options: SaveOptions, *, copy_behind: bool
    ) -> None:
        if copy_behind and self._runner.updates_last:
            # Buffers, and whatever else is saved, may change in the forward pass.
            options = options._replace(later=lambda box: box.name in self._state.names.parameters)
        self.saver.save(path, *self.saved_state(extra), options)

    def saved_state(self, extra: Mapping[str, Any]) -> tuple[list[OwnedSlice], Manifest]:
        self._synchronize()
        return self._state.saved(self._runner.counters()), self._state.manifest(extra)

    def saving_error(self) -> UserError | None:
        """Finish the save that is under way, and return what went wrong."""
        try:
            self.saver.finish()
        except UserError as error:
            return error
        return None

    # Loading.

    @property
    def is_loaded_in_part(self) -> bool:
        """Return whether a load has failed after it had begun to change the engine."""
        return self._unfinished_load != ""

    def check_loaded(self) -> None:
        """Raise if a part of the state is a checkpoint's, and a part is not."""
        if self.is_loaded_in_part:
            raise UserError(
                f"this engine has a part of its state from {self._unfinished_load}, whose load has failed, "
                "and a part from before; load a whole checkpoint with engine.load, or start again"
            )

    def load(self, open_saved: Callable[[], SavedState], *, optimizer: bool, options: bool) -> dict[str, Any]:
        failed, self._unfinished_load = self._unfinished_load, ""
        try:
            self._synchronize()
            loading = Loading(open_saved(), self._state, optimizer=optimizer, options=optimizer and options)
            loading.check()
            failed = str(loading.saved.path)
            self.saver.before_changes()
            self.num_loads += 1
            loading.read()
            loading.restore(self._runner)
            failed = ""
        finally:
            self._unfinished_load = failed
        return loading.saved.manifest.extra
