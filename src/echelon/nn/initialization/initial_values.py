"""The initial values of a model that was built without memory: each tensor alone, on any device.

Random values depend on the seed and the name of the tensor, and on nothing else: not on the plan, nor on
which rank computes them, nor on the other tensors of the model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from echelon.errors import UserError, raise_errors
from echelon.nn.batch import tensors_of
from echelon.nn.huggingface.modules import initializer
from echelon.nn.huggingface.weight_layouts import open_weights
from echelon.nn.initialization.tape import Tape, Window, key_of, on_meta, recording
from echelon.state.ownership import Slice
from echelon.state.weight_files.weight_folder import WeightFolder

Model = TypeVar("Model", bound=nn.Module)


class _Recording(NamedTuple):
    """The tape of how a model was built, and the version that each of its tensors had then."""

    tape: Tape
    seed: int
    versions: dict[str, int]


_MARK = "_echelon_deferred"  # of modules whose tensors are on a tape; a copy of a module has it too

_recordings: "WeakKeyDictionary[nn.Module, _Recording]" = WeakKeyDictionary()


def deferred(build: Callable[[], Model]) -> Model:
    """Build a model without memory for its weights: `parallelize` gives each rank the part that it needs,
    with the initial values that `build` gives them.

        model = echelon.deferred(lambda: Llama(config))

    All that `build` does to the tensors belongs to their initial values. Random values follow from torch's
    seed and the names of the tensors, so they are the same whatever the plan, and others than those of a
    model that is built at once.
    """
    tape = Tape()
    try:
        with recording(tape):
            model = build()
    except (NotImplementedError, RuntimeError, TypeError) as error:
        if "meta" not in str(error):
            raise
        raise UserError(
            f"deferred: the model looks at values of its tensors while it is built ({error}); compute these "
            "with Python's numbers, or build the model whole, without deferred"
        ) from error
    if not isinstance(model, nn.Module):
        raise UserError(f"deferred: the function returned a {type(model).__name__}; return a torch.nn.Module")
    versions = {name: tensor._version for name, tensor in named_tensors(model)}
    _recordings[model] = _Recording(tape, torch.initial_seed(), versions)
    for module in model.modules():
        vars(module)[_MARK] = True
    return model


def is_deferred(model: nn.Module) -> bool:
    """Return True if tensors of the model are on the meta device, where they have no values."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@final
class WeightSource:
    """The first values of a model's tensors, by their names: from files, or as the model begins. Nothing is
    read or computed before it is asked for. It knows the model as it is now, so make it first."""

    def __init__(self, model: nn.Module, device: torch.device, files: WeightFolder | None = None) -> None:
        """`device` is where values are computed."""
        self._device, self._files = device, files
        self._in_files = set() if files is None else {*files.names(), *files.ties}
        recording = _recordings.get(model)
        if recording is None:
            _refuse_parts(model)
            self._tape, self._unknown = record_resets(model)
            self.seed = torch.initial_seed()
        else:
            self._tape, self._unknown = recording.tape, _changed_since(model, recording)
            self.seed = recording.seed
        self._tensors: dict[str, Window | Tensor] = {
            name: Window.of(tensor) if tensor.is_meta else tensor.detach()
            for name, tensor in named_tensors(model)
        }
        self._random = self._number_draws()
        for name, tensor in self._tensors.items():
            if isinstance(tensor, Window) and 0 not in tensor.size:
                if not self._tape.is_defined(tensor):
                    self._unknown[name] = how_to_know(model, name, was_recorded=recording is not None)
                elif self._tape.has_generator(tensor.storage):
                    self._unknown[name] = "is drawn by a generator of its own; leave generator= out"
        self._unknown |= dict(_hidden_tensors(model))

    @classmethod
    def open(cls, model: nn.Module, folder: str | Path | None, device: torch.device) -> "WeightSource":
        """Make the source of a model's weights, and raise if some of them are not known."""
        files = None if folder is None else open_weights(folder, model)
        if files is not None:
            files.check()
        source = cls(model, device, files)
        raise_errors("the initial values of the model", source.errors())
        return source

    def describe(self) -> Iterator[str]:
        """Say where values come from, in lines that must be the same on every rank."""
        if self._device.type == "cuda":  # other GPUs draw other numbers
            yield f"initial values on {torch.cuda.get_device_name(self._device)}"
        yield from self._tape.describe()
        yield from () if self._files is None else self._files.describe()

    def constants(self) -> list[Tensor]:
        """List the values that are on this rank already; rank 0's count."""
        named = (tensor for tensor in self._tensors.values() if isinstance(tensor, Tensor))
        return [*named, *self._tape.constants()]

    def first_name(self, name: str) -> str:
        """Return the first name of a tensor that has several."""
        known = self._tensors[name]
        if isinstance(known, Window):
            return next(other for other, tensor in self._tensors.items() if tensor == known)
        return next(n for n, t in self._tensors.items() if isinstance(t, Tensor) and t.is_set_to(known))

    def errors(self) -> list[str]:
        """List the tensors whose values are not known, with the reason."""
        return [f"{name}: {reason}" for name, reason in self._unknown.items() if name not in self._in_files]

    def read(self, name: str, boxes: Sequence[Slice]) -> list[Tensor]:
        """Return boxes of one tensor, in memory of their own or of one whole tensor."""
        if self._files is not None and name in self._in_files:
            return self._files.read(name, boxes)
        whole = self.tensor(name)
        return [whole[box.box] for box in boxes]

    def tensor(self, name: str) -> Tensor:
        """Compute the whole initial tensor, on the device."""
        known = self._tensors[name]
        if isinstance(known, Tensor):
            return known.to(self._device)
        seed, draws = self.seed, self._random
        return self._tape.values(known, self._device, lambda note: key_of(seed, *draws.get(note, (note,))))

    def _number_draws(self) -> dict[int, tuple[str, int]]:
        """Number the draws of each tensor, so that its numbers do not depend on other tensors."""
        draws: dict[int, tuple[str, int]] = {}
        for name, tensor in self._tensors.items():
            if isinstance(tensor, Window):
                for count, note in enumerate(self._tape.draws(tensor.storage)):
                    draws.setdefault(note, (name, count))
        return draws


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, buffers, and tensors that modules have as plain attributes; by all names of each."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield (f"{path}.{name}" if path else name), value


def _hidden_tensors(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield tensors of the meta device in lists and dicts, where no rank can replace them."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            is_state = name in ("_parameters", "_buffers", "_modules") or isinstance(value, Tensor)
            leaves = [] if is_state else tensors_of(value)
            if any(on_meta(leaf) and not isinstance(leaf, nn.Parameter) for leaf in leaves):
                full_name = f"{path}.{name}" if path else name
                yield full_name, f"is a {type(value).__name__} with tensors; make them buffers"


def _refuse_parts(model: nn.Module) -> None:
    """Refuse a part or a copy of what `deferred` built, or a model around it: no tape leads there."""
    marked = [name for name, module in model.named_modules() if _MARK in vars(module) and is_deferred(module)]
    if marked:
        raise UserError(
            f"{marked[0] or type(model).__name__} is a part or a copy of a model that echelon.deferred has "
            "built, or inside another one; build all of the model that you train in one function"
        )


def _changed_since(model: nn.Module, recording: _Recording) -> dict[str, str]:
    """Find tensors that were changed after the recording."""
    return {
        name: "was changed after echelon.deferred had built the model; do it inside the function"
        for name, tensor in named_tensors(model)
        if tensor.is_meta and recording.versions.get(name, tensor._version) != tensor._version
    }


# Models that were built under torch.device("meta"), without a recording: modules that know their own initial
# values give them again.

_RESETS = ("reset_parameters", "_reset_parameters")  # the second is that of torch's attention and Transformer
_FLAG = "_is_hf_initialized"  # with which transformers notes that a module has its values


def record_resets(model: nn.Module) -> tuple[Tape, dict[str, str]]:
    """Record how modules reset their tensors, inner modules first, as they are built; and name the tensors to
    which that gives no one value, with the reason."""
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    tape = Tape(kept=[tensor for tensor in tensors.values() if not on_meta(tensor)])
    owner: dict[int, nn.Module] = {}  # of a storage: the module that gave it values
    doubtful: set[int] = set()
    with recording(tape), torch.no_grad(), _flags_restored(model):
        for module, reset in _resets(model):
            before = tape.writers()
            reset()
            for storage, count in tape.writers().items():
                if count != before.get(storage, 0):
                    first = owner.setdefault(storage, module)
                    if first is not module and first not in set(module.modules()):
                        doubtful.add(storage)
    return tape, {
        name: "is tied, and several modules give it values; build the model with echelon.deferred(lambda: …)"
        for name, tensor in tensors.items()
        if on_meta(tensor) and Window.of(tensor).storage in doubtful
    }


def how_to_know(model: nn.Module, name: str, *, was_recorded: bool) -> str:
    """Say why the initial values of a tensor are not known, and what to do."""
    if was_recorded:
        return "nothing gave it values while the model was built; initialise it there"
    owner = model.get_submodule(name.rpartition(".")[0])
    return (
        f"{type(owner).__name__} was built on the meta device and has no reset_parameters() that gives it "
        "values; build the model with echelon.deferred(lambda: …), or load weights"
    )


def _resets(module: nn.Module) -> Iterator[tuple[nn.Module, Callable[[], object]]]:
    if not any(map(on_meta, (*module.parameters(), *module.buffers()))):
        return  # it has its values
    initialize = initializer(module)
    if initialize is not None:  # a model of transformers initialises all of its modules
        yield module, initialize
        return
    for child in module.children():
        yield from _resets(child)
    for name in _RESETS:
        reset = getattr(module, name, None)
        if callable(reset):
            yield module, reset


@contextmanager
def _flags_restored(model: nn.Module) -> Iterator[None]:
    """Restore the flags of transformers afterwards: the values are not there yet."""
    flagged = {module for module in model.modules() if _FLAG in vars(module)}
    try:
        yield
    finally:
        for module in set(model.modules()) - flagged:
            vars(module).pop(_FLAG, None)
