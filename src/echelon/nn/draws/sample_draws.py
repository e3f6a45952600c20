"""Random numbers that a model draws by functions of torch, made by sample around a forward pass."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from echelon.nn.autograd.generators import GeneratorStates
from echelon.nn.draws.functions import BODIES, DRAWINGS
from echelon.nn.draws.sample_dim import Key, Source, drawing_module, is_checkpointed
from echelon.nn.dropout.training_position import next_use
from echelon.nn.hashing import hash_text
from echelon.nn.wrapping import has_entry

EVALUATION = -1  # the step of all evaluations: each draws the same numbers


@final
class SampleDraws:
    """Makes the numbers that functions of torch draw in a scope with these `draws`.

    `is_used`: whether a forward has drawn such numbers. `foreign`: draws by other generators, which belong to
    no sample, each "numpy.random in encoder.noise".
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | None = None,
        *,
        warns: bool = False,
        has_whole_samples: bool = True,
    ) -> None:
        """Keys are names of modules: give the whole model, before it is split. `warns`: of foreign draws.
        `has_whole_samples`: not only a part of each sequence."""
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        for name, module in model.named_modules():
            self._names[module] = name
        self._device = device or torch.device("cpu")
        self._warns, self._has_whole_samples = warns, has_whole_samples
        self._torchs: dict[tuple[int, int], bool] = {}  # of each draw of each module: whether torch makes it
        self._searches = False  # for the code that has moved a generator
        self.watches = True  # also generators that modules hold, of which a pass takes long to find any
        self.is_used = False
        self.foreign: dict[str, None] = {}

    @contextmanager
    def intercepted(self) -> Iterator[None]:
        """Make the numbers of a forward pass inside of a scope."""
        before = self.generators() if self.watches else GeneratorStates(self._device)
        with Interception(self, before if self._searches else None):
            yield
        self._searches = self._searches or before.moved()

    def of_recording(self) -> "RecordedDraws":
        return RecordedDraws(self)

    def generators(self) -> GeneratorStates:
        """Return the states of all generators that a forward may draw from."""
        return GeneratorStates(self._device, self._names)

    def name_foreign(self, what: str) -> None:
        """Note a draw that is not made here, in the module that runs now."""
        module = drawing_module(self._names)
        place = "the loss" if module is None else self._names[module] or "the model"
        text = f"{what} in {place}"
        if text not in self.foreign and self._warns:
            warnings.warn(
                f"{text} draws random numbers that do not belong to samples: every replica and microbatch "
                "draws its own, so that this plan does not train as one device does; draw them by functions "
                "of torch from its default generator (torch.randn_like), outside of torch.utils.checkpoint "
                "and of compiled code",
                stacklevel=2,
            )
        self.foreign[text] = None

    def say_late(self) -> None:
        """Warn that a forward has drawn, and none of the first steps did."""
        warnings.warn(
            "a forward has drawn from torch's generator, and none did in the first steps: these numbers do "
            "not belong to samples, and are the same on replicas that were seeded alike; from the next step "
            "on they are drawn by sample",
            stacklevel=2,
        )

    def key(self, shape: Sequence[int], *, is_seeded: bool) -> Key:
        """Return the position and the key of the next draw, and the module that draws.

        Raises where torch has to make it: a second run must draw the same, or the forward has seeded torch's
        generator for it; or this rank has an unknown part of the tensor.
        """
        module = drawing_module(self._names)
        name = "the loss" if module is None else f"module {self._names[module]}"
        layer = hash_text(f"draws of {name}")
        place = next_use(layer)
        assert place is not None, "a scope is open"
        position, use = place
        if is_seeded or (layer, use) not in self._torchs:
            is_part = len(shape) > 1 and not self._has_whole_samples
            self._torchs[layer, use] = is_seeded or is_part or _is_split(module) or is_checkpointed()
        if self._torchs[layer, use]:
            raise LeftToTorchError
        self.is_used = True
        return position, position.key(layer, use), module


def _is_split(module: nn.Module | None) -> bool:
    """Return True if tensor ranks share what is between the layers of a module, as heads of attention."""
    if module is None:
        return False
    return any(has_entry(each, "tensor") for each in (module, *module.children()))


@final
class RecordedDraws:
    """The same around passes that are recorded: no state of a generator can be read there."""

    def __init__(self, draws: SampleDraws) -> None:
        self._draws = draws

    def intercepted(self) -> AbstractContextManager[None]:
        return Interception(self._draws, None)


class LeftToTorchError(Exception):
    """This draw is torch's own."""


@contextmanager
def not_intercepted() -> Iterator[None]:
    """Switch the mode off around compiled code, whose draws no mode sees."""
    if not isinstance(_get_current_function_mode(), Interception):
        yield
        return
    with _pop_mode_temporarily():
        yield


@final
class Interception(TorchFunctionMode):
    """Inside, functions of torch that draw take their numbers from the open scope."""

    def __init__(self, draws: SampleDraws, searched: GeneratorStates | None) -> None:
        """`searched`: find out which code moves these generators, which takes long."""
        super().__init__()
        self._draws, self._searched = draws, searched
        self._seed = torch.default_generator.initial_seed()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func in DRAWINGS:
            return self._draw(func, args, kwargs)
        body = BODIES.get(func)
        if body is not None:
            with self:
                return body(*args, **kwargs)
        if self._searched is None:
            return func(*args, **kwargs)
        self._name_moved("")
        result = func(*args, **kwargs)
        self._name_moved(getattr(func, "__name__", "a function"))
        return result

    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Make the numbers of a call; torch makes those of generators that the model has seeded, or holds."""
        has_generator = kwargs.get("generator") is not None
        if not has_generator and torch._C._functorch.peek_interpreter_stack() is None:
            others = {name: value for name, value in kwargs.items() if name != "generator"}
            is_seeded = torch.default_generator.initial_seed() != self._seed
            try:
                result = DRAWINGS[func](
                    Source(partial(self._draws.key, is_seeded=is_seeded)), *args, **others
                )
            except LeftToTorchError:
                result = None
            if result is NotImplemented:
                return func(*args, **kwargs)
            if result is not None:
                return result
        self._draws.name_foreign(f"torch's {func.__name__}" + (" with a generator" if has_generator else ""))
        result = func(*args, **kwargs)
        self._searched = None if self._searched is None else self._searched.now()
        return result

    def _name_moved(self, function: str) -> None:
        """Name draws in this function of torch, or since the last one."""
        assert self._searched is not None
        moved = self._searched.moved_names()
        for name in moved:
            self._draws.name_foreign(f"torch's {function}" if name == "torch" and function else name)
        if moved:
            self._searched = self._searched.now()
