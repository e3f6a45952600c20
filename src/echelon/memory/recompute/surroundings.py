"""What is around a call and decides what it computes: the position in the training, generators of random
numbers, autocast, the modes of modules, the view of the sequence, and who records statistics of gates."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from echelon.nn.autograd.generators import GeneratorStates
from echelon.nn.dropout.training_position import current, restore
from echelon.nn.experts import current_recorder, recording

if TYPE_CHECKING:
    from echelon.memory.recompute.segment import SegmentSettings


@final
class Surroundings:
    """Taken before the first run; `restored` is around the second."""

    def __init__(self, modules: Sequence[nn.Module], settings: "SegmentSettings") -> None:
        self._position = current()
        self._autocast = _Autocast.current()
        self._recorder = current_recorder()
        self._modes = _Modes.of(modules)
        self._modules, self._view = modules, settings.view
        self._length, self._shared = self._view.true_length, self._view.shared
        self._generators = [
            GeneratorStates.of_torch(settings.device),
            GeneratorStates.of_others(modules),
        ]

    def finish(self) -> None:
        """The first run is over: states of generators that it did not use are not needed."""
        self._generators = [states for states in self._generators if states.moved()]

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as around:
            around.enter_context(restore(self._position))
            around.enter_context(self._autocast.restored())
            around.enter_context(recording(self._recorder))
            around.enter_context(self._modes.restored(self._modules))
            for states in self._generators:
                around.enter_context(_drawing_from(states))
            around.enter_context(self._seeing())
            yield

    @contextmanager
    def _seeing(self) -> Iterator[None]:
        view = self._view
        current = view.true_length, view.shared
        view.true_length, view.shared = self._length, self._shared
        try:
            yield
        finally:
            view.true_length, view.shared = current


@contextmanager
def _drawing_from(states: GeneratorStates) -> Iterator[None]:
    """Generators draw from `states` on inside, and go on afterwards as if nobody had drawn."""
    current = states.now()
    states.restore()
    try:
        yield
    finally:
        current.restore()


class _Autocast(NamedTuple):
    """For the CPU and for CUDA devices: whether matrices are cast, and to what."""

    states: tuple[tuple[str, bool, torch.dtype], ...]
    has_cache: bool

    @classmethod
    def current(cls) -> "_Autocast":
        kinds = ("cpu", "cuda")
        states = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
        )
        return cls(states, torch.is_autocast_cache_enabled())

    @contextmanager
    def restored(self) -> Iterator[None]:
        if self == _Autocast.current():
            yield
            return
        with ExitStack() as around:
            for kind, enabled, dtype in self.states:
                cast = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.has_cache)
                around.enter_context(cast)
            yield


class _Modes(NamedTuple):
    """Whether each module is in training mode, and how often old spectral norms iterate."""

    training: list[bool]
    iterations: dict[SpectralNorm, int]

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> "_Modes":
        hooks = {
            hook: hook.n_power_iterations
            for module in modules
            for hook in module._forward_pre_hooks.values()
            if isinstance(hook, SpectralNorm)
        }
        return cls([module.training for module in modules], hooks)

    @contextmanager
    def restored(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        current = _Modes.of(modules)
        self._set(modules, current)
        try:
            yield
        finally:
            current._set(modules, self)

    def _set(self, modules: Sequence[nn.Module], before: "_Modes") -> None:
        for module, training, was_training in zip(modules, self.training, before.training, strict=True):
            if training != was_training:
                module.training = training
        for hook, number in self.iterations.items():
            hook.n_power_iterations = number
