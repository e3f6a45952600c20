"""The states of random number generators: the global ones of torch, Python and numpy, and those that are
attributes of modules."""

import ctypes
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple, final

import numpy
import torch
from numpy.random.mtrand import get_bit_generator
from torch import Tensor, nn


class _Generator(NamedTuple):
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    seed: Callable[[int], object]


@final
class GeneratorStates:
    """The states of random generators at one moment."""

    def __init__(self, device: torch.device, modules: Iterable[nn.Module] = ()) -> None:
        """Read all global generators, and those that `modules` hold."""
        self._read([*_torch_generators(device), *_other_generators(), *_own_generators(modules)])

    @classmethod
    def of_torch(cls, device: torch.device) -> "GeneratorStates":
        """Read torch's global generators alone."""
        return cls.__new__(cls)._read(_torch_generators(device))

    @classmethod
    def of_others(cls, modules: Iterable[nn.Module]) -> "GeneratorStates":
        """Read all but torch's global ones."""
        return cls.__new__(cls)._read([*_other_generators(), *_own_generators(modules)])

    def _read(self, generators: Iterable[_Generator]) -> "GeneratorStates":
        self._states = [(generator, generator.read()) for generator in generators]
        return self

    def now(self) -> "GeneratorStates":
        """Read the same generators again."""
        return GeneratorStates.__new__(GeneratorStates)._read(generator for generator, _ in self._states)

    def restore(self) -> None:
        """Set the generators back to these states."""
        for generator, state in self._states:
            generator.write(state)

    def moved(self) -> bool:
        """Return True if a number was drawn since."""
        return any(self._moved())

    def moved_names(self) -> list[str]:
        """Name the generators of which a number was drawn since."""
        return list(dict.fromkeys(self._moved()))

    def _moved(self) -> Iterator[str]:
        return (each.name for each, state in self._states if not _is_same(state, each.read()))

    @contextmanager
    def seeded(self, number: int) -> Iterator[None]:
        """Seed these generators inside; afterwards they go on as if no number had been drawn."""
        for generator, _ in self._states:
            generator.seed(number)
        try:
            yield
        finally:
            self.restore()


def torch_readers(device: torch.device) -> list[Callable[[], Tensor]]:
    """The functions that return the states of torch's global generators, in host memory."""
    if device.type != "cuda":
        return [torch.default_generator.get_state]
    torch.cuda.init()  # which makes the generators of devices
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator.get_state, torch.cuda.default_generators[index].get_state]


def _torch_generators(device: torch.device) -> Iterator[_Generator]:
    cpu = torch.default_generator
    yield _Generator("torch", torch.get_rng_state, torch.set_rng_state, cpu.manual_seed)
    if device.type == "cuda":
        yield _Generator(
            "torch",
            lambda: torch.cuda.get_rng_state(device),
            lambda state: torch.cuda.set_rng_state(state, device),
            torch.cuda.manual_seed,
        )


def _other_generators() -> Iterator[_Generator]:
    yield _Generator("random", random.getstate, random.setstate, random.seed)
    state = _NUMPY.read, numpy.random.set_state
    yield _Generator("numpy.random", *state, lambda number: numpy.random.seed(_words(number)))


class _NumpyState:
    """The state of numpy's global generator. Numpy takes as long to return it as a small layer runs. So it
    is asked only if the memory of the generator is not what it was the last time."""

    _NUM_BYTES = 624 * 4 + 4  # of a Mersenne twister: its key, and the position in it

    def __init__(self) -> None:
        self._memory: bytes | None = None
        self._state: Any = None

    def read(self) -> Any:
        bits = get_bit_generator()
        if type(bits) is not numpy.random.MT19937:
            return numpy.random.get_state(legacy=False)
        memory = ctypes.string_at(bits.ctypes.state_address, self._NUM_BYTES)
        # A normal number that is left from the last pair is not in this memory.
        if memory != self._memory or self._state["has_gauss"]:
            self._memory, self._state = memory, numpy.random.get_state(legacy=False)
        return self._state


_NUMPY = _NumpyState()


def _own_generators(modules: Iterable[nn.Module]) -> Iterator[_Generator]:
    """Yield the generators of modules, also those in lists and dicts; each once."""
    found: dict[int, Any] = {}
    for module in modules:
        for value in vars(module).values():
            for each in _members(value):
                if _is_generator(type(each)):  # type: ignore[arg-type]
                    found[id(each)] = each
    return map(_generator, found.values())


def _members(value: Any) -> Iterable[Any]:
    kind = type(value)
    if kind is dict:
        return value.values()  # type: ignore[no-any-return]
    return value if kind is list or kind is tuple else (value,)


def generator_restorer(value: Any) -> Callable[[], object] | None:
    """Return a function that sets a generator back to its state of now; None if this is none."""
    if not _is_generator(type(value)):  # type: ignore[arg-type]
        return None
    generator = _generator(value)
    return partial(generator.write, generator.read())


@lru_cache(maxsize=4096)
def _is_generator(kind: type) -> bool:
    kinds = (torch.Generator, random.Random, numpy.random.RandomState, numpy.random.Generator)
    return issubclass(kind, kinds) and not issubclass(kind, random.SystemRandom)


def _generator(value: Any) -> _Generator:
    name = f"a {type(value).__name__} of its own"
    if isinstance(value, torch.Generator):
        return _Generator(name, value.get_state, value.set_state, value.manual_seed)
    if isinstance(value, random.Random):
        return _Generator(name, value.getstate, value.setstate, value.seed)
    if isinstance(value, numpy.random.RandomState):
        return _Generator(
            name,
            lambda: value.get_state(legacy=False),
            value.set_state,
            lambda seed: value.seed(_words(seed)),
        )
    bits = value.bit_generator
    return _Generator(
        name,
        lambda: bits.state,
        lambda state: setattr(bits, "state", state),
        lambda seed: setattr(bits, "state", type(bits)(seed).state),
    )


def _words(number: int) -> list[int]:
    """Split a seed as old generators of numpy take it."""
    return [number & 0xFFFFFFFF, number >> 32]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    if isinstance(one, Tensor):  # bytes in host memory, also of a device's generator
        return _bytes(one) == _bytes(other)
    return bool(numpy.array_equal(one, other)) if isinstance(one, numpy.ndarray) else bool(one == other)


def _bytes(state: Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.nbytes)
