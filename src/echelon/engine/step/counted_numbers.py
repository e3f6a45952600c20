"""Integers that forwards move (self.calls += 1): which of them count steps.

On one device a step is one forward pass. A stage lets every microbatch begin with the numbers of the first,
of those that one device moves as far as the plan then does: an audit runs both. What comes out otherwise
counts samples, or something else, and goes on from microbatch to microbatch.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import final

from torch import nn

from echelon.collectives.agreement import RankAgreement
from echelon.nn.forward_state import moved_integers, named_integers
from echelon.parallel.stage import LocalStages, Stage


@final
class CountedNumbers:
    """Numbers by name, like "layers.0.calls". All ranks call its methods together."""

    def __init__(self, model: nn.Module, local: LocalStages, agreement: RankAgreement) -> None:
        self._model, self._local, self._agreement = model, local, agreement
        self._first = named_integers(model)
        self._of_steps: set[str] = set()
        self._others: set[str] = set()

    def learn(self, of_device: Mapping[str, int]) -> None:
        """One device has moved these by so much: they may count steps."""
        self._of_steps |= of_device.keys() - self._others
        modules = dict(self._model.named_modules())
        places = [name.rpartition(".") for name in sorted(self._of_steps)]
        for stage in self._local.stages.values():
            inside = set(_modules_of(stage))
            slots = [(modules[path], key) for path, _, key in places if path in modules]
            stage.counted = [slot for slot in slots if slot[0] in inside]

    def goes_on(self, of_device: Mapping[str, int]) -> bool:
        """Return whether one of these goes on from microbatch to microbatch."""
        return not self._others.isdisjoint(of_device)

    def start(self) -> None:
        """A plan runs the same samples."""
        self._before = named_integers(self._model)

    def stop(self) -> None:
        self._moved = moved_integers(self._before, named_integers(self._model))

    def compare(self, of_device: Mapping[str, int]) -> set[str]:
        """Return what the plan has moved otherwise than one device, though no stage held it back."""
        own = self._own({*of_device, *self._moved})
        differing = [name for name in own if self._moved.get(name) != of_device.get(name)]
        wrong = set(chain(*self._agreement.gather(differing)))
        held = wrong & self._of_steps
        if not held:
            return wrong
        self._of_steps -= held
        self._others |= held
        self.learn({})
        return set()

    def share(self) -> None:
        """Tell all ranks how far the layers of other stages have counted: one device runs these too."""
        numbers, modules = named_integers(self._model), dict(self._model.named_modules())
        own = self._own(name for name, number in numbers.items() if number != self._first.get(name))
        for of_rank in self._agreement.gather({name: numbers[name] for name in own}):
            for name, number in of_rank.items():
                path, _, key = name.rpartition(".")
                if name not in own and path in modules:
                    setattr(modules[path], key, number)

    def _own(self, names: Iterable[str]) -> list[str]:
        """Return those of this rank's layers."""
        own = {module for stage in self._local.stages.values() for module in _modules_of(stage)}
        paths = {path for path, module in self._model.named_modules() if module in own}
        return sorted(name for name in names if name.rpartition(".")[0] in paths)


def _modules_of(stage: Stage) -> list[nn.Module]:
    return [*stage.module.modules(), *getattr(stage.module, "containers", ())]
