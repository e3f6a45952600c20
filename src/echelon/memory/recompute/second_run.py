"""Makes a second run the same as the first: its surroundings are restored, and its outputs compared.

Surroundings decide what a call computes: the position in the training, random generators, autocast,
the modes of modules and what they count, the view of the sequence, and the recorder of gates' statistics.
What is not replayed (a generator of its own, a clock, a file) would make gradients that belong to no forward
pass: the first step compares what layers return in both runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from echelon.collectives.agreement import device_fingerprint, measures, near
from echelon.errors import UserError
from echelon.nn.autograd.generators import GeneratorStates
from echelon.nn.batch import tensors_of
from echelon.nn.dropout.training_position import current, restore
from echelon.nn.experts import current_recorder, recording
from echelon.nn.forward_state import (
    ABSENT,
    NumberSlot,
    attributes_as,
    integer_attributes,
    moved_integers,
)
from echelon.parallel.observer import StepObserver

if TYPE_CHECKING:
    from echelon.memory.recompute.segment import SegmentSettings


@final
class Surroundings:
    """Taken before the first run; `restored` is around the second."""

    def __init__(self, modules: Sequence[nn.Module], settings: "SegmentSettings") -> None:
        self._position = current()
        self._autocast = _autocast_states()
        self._recorder = current_recorder()
        self._modes = _Modes.of(modules)
        self._modules, self._view = modules, settings.view
        self._numbers: Mapping[NumberSlot, Any] = integer_attributes(modules)
        self._length, self._shared = self._view.true_length, self._view.shared
        self._generators = [GeneratorStates.of_torch(settings.device), GeneratorStates.of_others(modules)]

    def finish(self) -> None:
        """The first run is over: what it did not change is not needed."""
        self._generators = [states for states in self._generators if states.moved()]
        changed = moved_integers(self._numbers, integer_attributes(self._modules))
        self._numbers = {slot: self._numbers.get(slot, ABSENT) for slot in changed}

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as around:
            around.enter_context(restore(self._position))
            around.enter_context(_autocast_as(self._autocast))
            around.enter_context(recording(self._recorder))
            around.enter_context(self._modes.restored(self._modules))
            around.enter_context(attributes_as(self._numbers))
            for states in self._generators:
                around.enter_context(_drawing_from(states))
            around.enter_context(self._view.seeing(self._length, self._shared))
            yield


@contextmanager
def _drawing_from(states: GeneratorStates) -> Iterator[None]:
    """Generators draw from `states` on inside, and continue afterwards where they were."""
    current = states.now()
    states.restore()
    try:
        yield
    finally:
        current.restore()


Autocast = list[tuple[str, bool, torch.dtype, bool]]  # of each kind of devices


def _autocast_states() -> Autocast:
    """For the CPU and for CUDA devices: whether matrices are cast, to what, and whether weights once."""
    cached = torch.is_autocast_cache_enabled()
    kinds = ("cpu", "cuda")
    return [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k), cached) for k in kinds]


@contextmanager
def _autocast_as(states: Autocast) -> Iterator[None]:
    with ExitStack() as around:
        for kind, is_on, dtype, cached in () if states == _autocast_states() else states:
            around.enter_context(torch.autocast(kind, dtype, enabled=is_on, cache_enabled=cached))
        yield


class _Modes(NamedTuple):
    """The training mode of each module, and how often old spectral norms iterate."""

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


@final
class OutputPrint:
    """Fingerprints of the tensors that a layer has returned."""

    def __init__(self, output: Any) -> None:
        leaves = tensors_of(output)
        tensors = [leaf.detach() for leaf in leaves if leaf.layout == torch.strided]
        self._bits = [device_fingerprint(tensor) for tensor in tensors]
        # A CUDA device may add in another order each time. A CPU does not.
        self._measures = [
            (measures(tensor), torch.finfo(tensor.dtype).eps)
            for tensor in tensors
            if tensor.is_cuda and tensor.is_floating_point()
        ]

    def is_comparable(self, other: "OutputPrint") -> bool:
        """Return whether both are of as many tensors, and of as many that are measured."""
        return (len(self._bits), len(self._measures)) == (len(other._bits), len(other._measures))

    def differs(self, other: "OutputPrint") -> list[Tensor]:
        flags = [(one != two).any() for one, two in zip(self._bits, other._bits, strict=True)]
        pairs = zip(self._measures, other._measures, strict=True)
        is_near = [near(torch.stack([one, two])[:, None], eps).all() for (one, eps), (two, _) in pairs]
        return (
            [flag & ~close for flag, close in zip(flags, is_near, strict=True)]
            if len(is_near) == len(flags)
            else flags
        )


@final
class SecondRunCheck(StepObserver):
    """Open until the gradients of the first step are there, or of a later one if that was refused."""

    def __init__(self) -> None:
        self.is_open = True
        self._flags: list[tuple[str, Tensor]] = []

    def compare(self, name: str, first: OutputPrint, second: OutputPrint) -> None:
        self._flags += [(name, flag) for flag in first.differs(second)]

    def check_first_step(self) -> None:
        """Raise if a layer has returned something else in a second run. Reads the device, once."""
        names = dict.fromkeys(name for name, flag in self._flags if flag)
        self.is_open, self._flags = bool(names), []
        if names:
            raise UserError(
                f"recompute: {', '.join(names)} returned something else when it ran again for the backward "
                "pass, so gradients would be wrong; its forward must do the same for the same input: draw "
                "random numbers from torch, Python or numpy, or from a generator that is an attribute of "
                "the module, and with update=backward read no weight (detached) that is updated before the "
                "second run; or use recompute=none"
            )
