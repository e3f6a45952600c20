"""The mode that makes the numbers of torch's functions that draw."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from echelon.nn.autograd.generators import GeneratorStates
from echelon.nn.draws.bodies import BODIES
from echelon.nn.draws.functions import DRAWINGS
from echelon.nn.draws.sample_dim import find_dim
from echelon.nn.draws.streams import SampleDim, uniform
from echelon.nn.hashing import hash_of

if TYPE_CHECKING:
    from echelon.nn.draws.sample_draws import SampleDraws


class LeftToTorchError(Exception):
    """This draw is torch's own."""


@contextmanager
def not_intercepted() -> Iterator[None]:
    """Around compiled code, whose draws nobody can intercept."""
    if not isinstance(_get_current_function_mode(), Interception):
        yield
        return
    with _pop_mode_temporarily():
        yield


@final
class Interception(TorchFunctionMode):
    """Inside, functions of torch that draw take their numbers from the open scope."""

    def __init__(self, draws: "SampleDraws", searched: GeneratorStates | None) -> None:
        """`searched`: find out who moves these generators, which takes long."""
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
        """A generator that the model has seeded, or holds itself, is its own affair."""
        has_generator = kwargs.get("generator") is not None
        if not has_generator and torch._C._functorch.peek_interpreter_stack() is None:
            others = {name: value for name, value in kwargs.items() if name != "generator"}
            is_seeded = torch.default_generator.initial_seed() != self._seed
            try:
                result = DRAWINGS[func](_CallSource(self._draws, is_seeded=is_seeded), *args, **others)
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
        """Somebody has drawn: in this function of torch, or since the last one."""
        assert self._searched is not None
        moved = self._searched.moved_names()
        for name in moved:
            self._draws.name_foreign(f"torch's {function}" if name == "torch" and function else name)
        if moved:
            self._searched = self._searched.now()


@final
class _CallSource:
    """The numbers of one call."""

    def __init__(self, draws: "SampleDraws", *, is_seeded: bool) -> None:
        self._draws, self._is_seeded = draws, is_seeded

    def uniform(
        self, shape: Sequence[int], device: torch.device, like: Tensor | None, *, shared: bool = False
    ) -> Tensor:
        shape = tuple(shape)
        position, key, module = self._draws.key(shape, is_seeded=self._is_seeded)
        dim = None if shared else find_dim(shape, position.samples, like, module)
        sample_dim = None if dim is None else SampleDim(dim, position.samples, position.first_sample)
        return uniform(key, shape, device, sample_dim)

    def by_generator(self, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        tensors = torch.broadcast_tensors(*args)
        shape = tuple(tensors[0].shape)
        position, key, module = self._draws.key(shape, is_seeded=self._is_seeded)
        generator = torch.Generator(args[0].device)
        dim = find_dim(shape, position.samples, args[0], module)
        if dim is None:
            return function(*tensors, generator=generator.manual_seed(key))
        first = int(position.first_sample)
        split = zip(*(each.split(shape[dim] // position.samples, dim) for each in tensors), strict=True)
        parts = [
            function(*part, generator=generator.manual_seed(hash_of(first + number, start=key)))
            for number, part in enumerate(split)
        ]
        return torch.cat(parts, dim)
