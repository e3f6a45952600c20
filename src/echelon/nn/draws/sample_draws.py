"""What a model draws by functions of torch, made by sample around a forward pass."""

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from echelon.nn.autograd.generators import GeneratorStates
from echelon.nn.draws.interception import Interception, LeftToTorchError
from echelon.nn.draws.sample_dim import drawing_module, is_checkpointed
from echelon.nn.dropout import TrainingPosition, next_use
from echelon.nn.hashing import hash_of
from echelon.nn.wrapping import has_entry

EVALUATION = -1  # the step of all evaluations: each draws the same numbers


@final
class SampleDraws:
    """Makes the numbers of a scope that is given this.

    `is_used`: whether a forward has drawn such numbers. `foreign`: draws that are made by somebody else, and
    belong to no sample, each "numpy.random in encoder.noise".
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
        self._searches = False  # for who has moved a generator
        self.watches = True  # also generators that modules hold, of which a pass takes long to find any
        self.is_used = False
        self.foreign: dict[str, None] = {}

    @contextmanager
    def intercepted(self) -> Iterator[None]:
        """Around a forward pass inside of a scope."""
        before = self.generators() if self.watches else GeneratorStates(self._device)
        with Interception(self, before if self._searches else None):
            yield
        self._searches = self._searches or before.moved()

    def generators(self) -> GeneratorStates:
        """Where all generators stand that a forward may draw from."""
        return GeneratorStates(self._device, self._names)

    def name_foreign(self, what: str) -> None:
        """A draw that is not made here, in the module that runs now."""
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
        """A forward has drawn, and none of the first steps did."""
        warnings.warn(
            "a forward has drawn from torch's generator, and none did in the first steps: these numbers do "
            "not belong to samples, and are the same on replicas that were seeded alike; from the next step "
            "on they are drawn by sample",
            stacklevel=2,
        )

    def key(self, shape: Sequence[int], *, is_seeded: bool) -> tuple[TrainingPosition, int, nn.Module | None]:
        """Of the next draw: where it is, its key, and the module that draws. Raises where torch has to make
        it: a second run must draw the same, or the forward has seeded torch's generator for it; or this rank
        has a part of the tensor, and nobody knows which."""
        module = drawing_module(self._names)
        name = "the loss" if module is None else f"module {self._names[module]}"
        digest = hashlib.blake2b(f"draws of {name}".encode(), digest_size=8).digest()
        layer = int.from_bytes(digest, "little")
        place = next_use(layer)
        assert place is not None, "a scope is open"
        position, use = place
        if is_seeded or (layer, use) not in self._torchs:
            is_part = len(shape) > 1 and not self._has_whole_samples
            self._torchs[layer, use] = is_seeded or is_part or _is_split(module) or is_checkpointed()
        if self._torchs[layer, use]:
            raise LeftToTorchError
        self.is_used = True
        return position, hash_of(position.seed, position.step, layer, use), module


def _is_split(module: nn.Module | None) -> bool:
    """Whether tensor ranks share what is between the layers of a module, as the heads of its attention."""
    if module is None:
        return False
    return any(has_entry(each, "tensor") for each in (module, *module.children()))
