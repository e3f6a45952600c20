"""The initial values of a model that was built without memory: each tensor alone, on any device.

Random values depend on the seed and the name of the tensor, and on nothing else: not on the plan, nor on
which rank computes them, nor on the other tensors of the model.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, TypeVar, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.initialization.recording import recording
from echelon.initialization.resetting import how_to_know, record_resets
from echelon.initialization.tape import Tape, Window, key_of
from echelon.ownership import Slice

Model = TypeVar("Model", bound=nn.Module)


class _Recording(NamedTuple):
    """How a model was built, and which version each of its tensors had then."""

    tape: Tape
    seed: int
    versions: dict[str, int]


_recordings: "WeakKeyDictionary[nn.Module, _Recording]" = WeakKeyDictionary()


def deferred(build: Callable[[], Model]) -> Model:
    """The model that `build` returns, without memory for its weights: `parallelize` gives each rank the part
    that it needs, with the initial values that `build` gives them.

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
    return model


def is_deferred(model: nn.Module) -> bool:
    """Whether parameters of the model are on the meta device, where they have no values."""
    return any(parameter.is_meta for parameter in model.parameters())


@final
class InitialValues:
    """A WeightSource: what a model's tensors start with. Knows them as they are now, so make it first."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        recording = _recordings.get(model)
        self._unknown = {} if recording is None else _changed_since(model, recording)
        self._tape = record_resets(model) if recording is None else recording.tape
        self.seed = torch.initial_seed() if recording is None else recording.seed
        self._tensors: dict[str, Window | Tensor] = {
            name: Window.of(tensor) if tensor.is_meta else tensor.detach()
            for name, tensor in named_tensors(model)
        }
        self._random = self._number_draws()
        for name, tensor in self._tensors.items():
            is_known = not isinstance(tensor, Window) or self._tape.is_defined(tensor) or 0 in tensor.size
            if not is_known:
                self._unknown[name] = how_to_know(model, name, was_recorded=recording is not None)

    def errors(self, but: Collection[str] = ()) -> list[str]:
        """Of the tensors whose values are not known; those of `but` come from elsewhere."""
        return [f"{name}: {reason}" for name, reason in self._unknown.items() if name not in but]

    def read(self, name: str, boxes: Sequence[Slice]) -> list[Tensor]:
        whole = self.tensor(name)
        return [whole[box.box] for box in boxes]

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, on the device."""
        known = self._tensors[name]
        if isinstance(known, Tensor):
            return known.to(self._device)
        return self._tape.values(known, self._device, self._seed_of)

    def _seed_of(self, note: int) -> int:
        return key_of(self.seed, *self._random.get(note, (note,)))

    def _number_draws(self) -> dict[int, tuple[str, int]]:
        """Which draw of which tensor a note is, so that its numbers do not depend on other tensors."""
        draws: dict[int, tuple[str, int]] = {}
        for name, tensor in self._tensors.items():
            if isinstance(tensor, Window):
                for count, note in enumerate(self._tape.random_writers(tensor.storage)):
                    draws.setdefault(note, (name, count))
        return draws


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, and tensors that modules have as plain attributes; by all names of each."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield (f"{path}.{name}" if path else name), value


def _changed_since(model: nn.Module, recording: _Recording) -> dict[str, str]:
    """What was changed after it was recorded, where nobody took note."""
    return {
        name: "was changed after echelon.deferred had built the model; do it inside the function"
        for name, tensor in named_tensors(model)
        if tensor.is_meta and recording.versions.get(name, tensor._version) != tensor._version
    }
