"""The state of an engine on this rank, as slices of global tensors: all that it needs to go on.

owned()        weights, float32 masters, optimizer state, buffers, counters of steps, seed
saved()        these, and what else a checkpoint holds:
  (random)       where nothing is seeded, the random state of each rank
  (learned)      what the first step has shown, and later ones compute by
  extra state    what modules return from get_extra_state: a tensor, or plain data as JSON
  temporary      buffers that are not persistent, if training has changed them
manifest()     options of the optimizer's groups, and state of the optimizer that is no tensor
"""

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from echelon.collectives.agreement import check_on_every_rank, gather_values
from echelon.engine.setup import Setup
from echelon.engine.step.step_counter import StepCounter
from echelon.errors import raise_errors
from echelon.nn.wrapping import find_wrapper
from echelon.parallel.data.all_reduce import Bucketed
from echelon.parallel.stage import LocalStages
from echelon.parallel.tensor.modules import Column
from echelon.state.bounded_json import parse_json
from echelon.state.checkpoint.manifest import Manifest
from echelon.state.checkpoint.manifest import Number as PlainNumber
from echelon.state.ownership import ENGINE, VALUE, OwnedSlice, Slice, whole_slice
from echelon.state.weight_files.tensor_file import DTYPES
from echelon.update.numbers import Number
from echelon.update.update import Update
from echelon.version import VERSION

RANDOM, LEARNED = "(random)", "(learned)"  # names in a checkpoint; no parameter can have them
JSON = "json"  # the part of a module's extra state that is plain data
EXTRA_STATE = "_extra_state"  # torch's name for it, behind that of the module
TEMPORARY = "temporary"  # the part that is a buffer which no state dict has
PARAMETERS = "parameters"  # the names of a group's parameters, among its options

_PLAIN = (bool, int, float, str, type(None), tuple, list, Tensor)


@final
class EngineState:
    """All that an engine trains, as it is now; saving, loading and the audit read it."""

    def __init__(self, setup: Setup, counter: StepCounter) -> None:
        self.mesh, self.module, self.names = setup.mesh, setup.model, setup.names
        self.local, self.in_whole, self.update = setup.local, setup.layers.in_whole, setup.update
        self.counter = counter
        self.seed = -1 if setup.scopes.seed is None else setup.scopes.seed  # -1: nothing is seeded
        # torch leaves buffers out of state dicts that can be computed again: tables of positions, masks. One
        # that a forward writes to cannot, and its version or address tells.
        self._first_marks = {name: _mark(buffer) for name, buffer in _temporary(setup.model)}

    @property
    def modules(self) -> list[nn.Module]:
        """All modules of the model and of this rank's stages, whose layers may be made on the fly."""
        in_stages = [each for stage in self.local.modules for each in stage.modules()]
        return list(dict.fromkeys([*self.module.modules(), *in_stages]))

    @property
    def worker(self) -> int | None:
        """The asynchronous worker that this rank belongs to."""
        return self.mesh.position.replica if self.mesh.plan.sync == "async" else None

    # Slices.

    def owned(self) -> list[OwnedSlice]:
        parts = [each for owned in self.update.owned() for each in self.in_whole(_plain(owned))]
        counters = {
            "steps": self.counter.updates,
            "begun steps": self.counter.begun,
            "skipped steps": self.counter.skipped,
        }
        numbers = [*self._counters(counters), _number("seed", self.seed)]
        return [*parts, *self.update.owned_whole(), *self.buffers(), *numbers]

    def values(self) -> list[OwnedSlice]:
        """List weights and buffers."""
        weights = [each for owned in self.local.owned_weights() for each in self.in_whole(_plain(owned))]
        return [*weights, *self.buffers()]

    def buffers(self) -> list[OwnedSlice]:
        """List the buffers of the state dict."""
        return [
            _own(name, buffer)
            for name, buffer in self.module.state_dict(keep_vars=True).items()
            if isinstance(buffer, Tensor) and name in self.names.state and name not in self.names.parameters
        ]

    def temporary_buffers(self, *, changed: bool = False) -> list[OwnedSlice]:
        """List the buffers that no state dict has; `changed`: those that were changed, or not there."""
        return [
            _own(name, buffer, TEMPORARY)
            for name, buffer in _temporary(self.module)
            if buffer.layout is torch.strided and not (changed and self._is_as_at_first(name, buffer))
        ]

    def _is_as_at_first(self, name: str, buffer: Tensor) -> bool:
        return self._first_marks.get(name) == _mark(buffer)

    def _warn_of_sparse_buffers(self) -> None:
        changed = [
            name
            for name, buffer in _temporary(self.module)
            if buffer.layout is not torch.strided and not self._is_as_at_first(name, buffer)
        ]
        if changed:
            warnings.warn(
                f"{', '.join(changed)}: sparse buffers have changed and are not in the checkpoint; an engine "
                "that loads it begins with its model's. If a step reads what earlier ones left, keep dense "
                "buffers, which checkpoints have",
                stacklevel=2,
            )

    def saved(self, counters: Mapping[str, Number]) -> list[OwnedSlice]:
        """List all that this rank has to save, with `counters` of its runner. Raises on every rank if a part
        of it cannot be saved."""
        slices = [*self.owned(), *self._counters(counters), *self.temporary_buffers(changed=True)]
        slices += [_own(LEARNED, _json_bytes(learned_order(self.local)), f"rank {self.mesh.rank}")]
        if self.seed == -1:
            rank, device = self.mesh.rank, self.mesh.device
            slices += [_own(RANDOM, torch.get_rng_state(), f"cpu of rank {rank}")]
            if device.type == "cuda":
                slices += [_own(RANDOM, torch.cuda.get_rng_state(device), f"cuda of rank {rank}")]

        def add_and_check() -> None:
            slices.extend(_extra_state(self.module))
            known = set(DTYPES.values())
            errors = [
                f"{each.slice.name} ({each.slice.part}) is of type {each.tensor.dtype}, which no safetensors "
                "file holds; use another type"
                for each in slices
                if each.tensor.dtype not in known
            ]
            raise_errors("the state of this engine, which cannot be saved", errors)

        check_on_every_rank(add_and_check)
        self._warn_of_sparse_buffers()
        return slices

    def _counters(self, counters: Mapping[str, Number]) -> list[OwnedSlice]:
        """Numbers of this rank; asynchronous workers each have their own."""
        whose = "" if self.worker is None else f" of worker {self.worker}"
        return [_number(f"{part}{whose}", value) for part, value in counters.items()]

    # The manifest.

    def manifest(self, extra: Mapping[str, Any]) -> Manifest:
        """Describe what a checkpoint holds beside tensors and files; all ranks must call this."""
        numbers: dict[str, dict[str, PlainNumber]] = {}
        check_on_every_rank(lambda: numbers.update(_state_numbers(self.update)))
        rows = self.gather([_groups(self.update), numbers])
        return Manifest(
            step=self.counter.begun,
            plan=str(self.mesh.plan),
            ranks=self.mesh.plan.ranks,
            saved=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={"echelon": VERSION, "torch": torch.__version__},
            groups=_joined(group for groups, _ in rows for group in groups),
            state_numbers={name: of_name for _, by_name in rows for name, of_name in by_name.items()},
            extra=dict(extra),
        )

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's plain values, in rank order."""
        return gather_values(value, self.mesh.group("all"), self.mesh.device)


def _groups(update: Update) -> list[dict[str, Any]]:
    """Read the options of this rank's groups as plain values, with the names of their parameters."""
    names = {tensor: name for name, tensor in update.updated_tensors()}
    return [
        {
            **{
                option: value.item() if isinstance(value, Tensor) else value
                for option, value in group.items()
                if option not in ("params", "param_names") and isinstance(value, _PLAIN)
            },
            PARAMETERS: sorted({names[p] for p in group["params"] if p in names}),
        }
        for group in update.optimizer.param_groups
    ]


def _joined(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the groups of all ranks: those with the same options are one."""
    joined: dict[str, tuple[dict[str, Any], set[str]]] = {}
    for group in groups:
        options = {name: value for name, value in group.items() if name != PARAMETERS}
        joined.setdefault(json.dumps(options, sort_keys=True), (options, set()))[1].update(group[PARAMETERS])
    return [{**options, PARAMETERS: sorted(names)} for options, names in joined.values()]


def _state_numbers(update: Update) -> dict[str, dict[str, PlainNumber]]:
    """Read state that is no tensor: numbers. None is as good as nothing; anything else is refused."""
    numbers: dict[str, dict[str, PlainNumber]] = {}
    errors = []
    for name, tensor in update.updated_tensors():
        for key, value in update.optimizer.state.get(tensor, {}).items():
            if isinstance(value, bool | int | float):
                numbers.setdefault(name, {})[key] = value
            elif value is not None and not isinstance(value, Tensor):
                errors.append(f"{name}: its state {key!r} is a {type(value).__name__}")
    kind = type(update.optimizer).__name__
    raise_errors(f"the state of optimizer {kind}, which must be tensors or numbers to be saved", errors)
    return numbers


def _number(part: str, value: Number) -> OwnedSlice:
    """A number of the engine's own."""
    return OwnedSlice(Slice(ENGINE, part, (), (), ()), torch.as_tensor(value))


def _plain(owned: OwnedSlice) -> OwnedSlice:
    """As a plain tensor, which can be read between steps."""
    with torch._C.DisableTorchFunctionSubclass():
        return owned._replace(tensor=owned.tensor.detach())


def _own(name: str, tensor: Tensor, part: str = VALUE) -> OwnedSlice:
    return OwnedSlice(whole_slice(name, tensor, part), tensor)


def _json_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


# Extra state of modules, and buffers that are not persistent.


def _extra_state(module: nn.Module) -> list[OwnedSlice]:
    """List extra state that is plain data; tensors are among the buffers."""
    owned, errors = [], []
    for name, each in extra_state_modules(module).items():
        value = each.get_extra_state()
        if isinstance(value, Tensor):
            continue
        try:
            data = _json_bytes(value)
            parse_json(data.numpy().tobytes())  # what is saved can be loaded
        except (TypeError, ValueError, RecursionError) as error:
            errors.append(
                f"{name}: get_extra_state() of {type(each).__name__} returns a {type(value).__name__}; it "
                f"must return a tensor, or lists, dicts, strings and numbers ({error})"
            )
            continue
        owned.append(_own(name, data, JSON))
    raise_errors("the extra state of modules, which cannot be saved", errors)
    return owned


def extra_state_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Find the modules of this rank that have extra state, by its name in the state dict."""
    return {
        f"{path}.{EXTRA_STATE}".removeprefix("."): each
        for path, each in module.named_modules()
        if type(each).get_extra_state is not nn.Module.get_extra_state
    }


def _temporary(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, each in module.named_modules():
        for name in sorted(each._non_persistent_buffers_set):
            buffer = each._buffers.get(name)
            if buffer is not None and not buffer.is_mkldnn:
                yield f"{path}.{name}".removeprefix("."), buffer


def _mark(buffer: Tensor) -> tuple[int, int, StorageWeakRef]:
    """Return what differs after a change. While a weak reference exists, no other memory is equal to it."""
    values = buffer
    if buffer.layout is not torch.strided:
        values = buffer._values() if buffer.is_sparse else buffer.values()
    return buffer._version, values.data_ptr(), StorageWeakRef(values.untyped_storage())


# What the first step has shown, and later ones compute by. It decides in which order numbers are summed: the
# same plan goes on in every bit as if it had not stopped, and to other plans it does not matter.
#
#     columns    which matrices have one input, and sum its gradient together (parallel/tensor/regions.py)
#     buckets    in which order gradients come, and lie in buckets


def learned_order(local: LocalStages) -> dict[str, Any]:
    """Return what this rank has learned, as plain data."""
    columns = dict(_columns(local))
    names = {column: name for name, column in columns.items()}
    sharing = {
        names[first]: [names[each] for each in together]
        for shared in {column.region.shared_input for column in columns.values()}
        for first, together in shared.learned.items()
    }
    return {"columns": sharing, "buckets": [each.learned_order() for each in _bucketed(local)]}


def restore_learned_order(local: LocalStages, data: dict[str, Any]) -> None:
    """Begin with what another engine of the same plan has learned."""
    columns = dict(_columns(local))
    for first, together in data["columns"].items():
        if all(name in columns for name in (first, *together)):
            columns[first].region.shared_input.learned[columns[first]] = [columns[name] for name in together]
    for each, order in zip(_bucketed(local), data["buckets"], strict=False):
        each.restore_order(order)


def _columns(local: LocalStages) -> Iterator[tuple[str, Column]]:
    for index, stage in local.stages.items():
        for path, module in stage.module.named_modules():
            column = find_wrapper(module, Column)
            if column is not None:
                yield f"{index}/{path}", column


def _bucketed(local: LocalStages) -> list[Bucketed]:
    return [sharing for sharing in dict.fromkeys(local.sharings) if isinstance(sharing, Bucketed)]
