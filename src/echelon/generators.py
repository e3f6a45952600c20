"""Where generators of random numbers stand: the global ones of torch, Python and numpy, and those that are
attributes of modules."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, final

import numpy
import torch
from torch import Tensor, nn


class _Generator(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], object]


@final
class GeneratorStates:
    """Their states now. `modules`: whose own generators count too."""

    def __init__(self, device: torch.device, modules: Iterable[nn.Module] = ()) -> None:
        self._read([*_torch_generators(device), *_other_generators(), *_own_generators(modules)])

    @classmethod
    def of_torch(cls, device: torch.device) -> "GeneratorStates":
        """Of torch's global generators alone."""
        return cls.__new__(cls)._read(_torch_generators(device))

    @classmethod
    def of_others(cls, modules: Iterable[nn.Module]) -> "GeneratorStates":
        """Of all but torch's global ones."""
        return cls.__new__(cls)._read([*_other_generators(), *_own_generators(modules)])

    def _read(self, generators: Iterable[_Generator]) -> "GeneratorStates":
        self._states = [(generator, generator.read()) for generator in generators]
        return self

    def now(self) -> "GeneratorStates":
        """Where the same generators stand now."""
        return GeneratorStates.__new__(GeneratorStates)._read(generator for generator, _ in self._states)

    def restore(self) -> None:
        for generator, state in self._states:
            generator.write(state)

    def moved(self) -> bool:
        """Whether anybody has drawn a number since."""
        return any(not _is_same(state, generator.read()) for generator, state in self._states)


def _torch_generators(device: torch.device) -> Iterator[_Generator]:
    yield _Generator(torch.get_rng_state, torch.set_rng_state)
    if device.type == "cuda":
        yield _Generator(
            lambda: torch.cuda.get_rng_state(device), lambda state: torch.cuda.set_rng_state(state, device)
        )


def _other_generators() -> Iterator[_Generator]:
    yield _Generator(random.getstate, random.setstate)
    yield _Generator(lambda: numpy.random.get_state(legacy=False), numpy.random.set_state)


def _own_generators(modules: Iterable[nn.Module]) -> Iterator[_Generator]:
    """Also those in lists and dicts; each once."""
    values = [value for module in modules for value in vars(module).values()]
    inside = [each for value in values for each in _members(value)]
    found = {id(value): _generator(value) for value in [*values, *inside]}
    yield from (generator for generator in found.values() if generator is not None)


def _members(value: Any) -> Iterable[Any]:
    if type(value) is dict:
        return value.values()
    return value if type(value) in (list, tuple) else ()


def _generator(value: Any) -> _Generator | None:
    if isinstance(value, torch.Generator):
        return _Generator(value.get_state, value.set_state)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return _Generator(value.getstate, value.setstate)
    if isinstance(value, numpy.random.RandomState):
        return _Generator(lambda: value.get_state(legacy=False), value.set_state)
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return _Generator(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return bool(numpy.array_equal(one, other)) if isinstance(one, numpy.ndarray) else bool(one == other)
