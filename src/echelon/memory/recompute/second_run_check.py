"""Whether layers compute the same when they run again, found out in the first step.

What is not replayed (a random number from a generator of its own, a clock, a file) would make gradients that
belong to no forward pass. Flags stay on the device until the step asks.
"""

from typing import Any, final

import torch
from torch import Tensor

from echelon.collectives.fingerprint import device_fingerprint, measures, near
from echelon.errors import UserError
from echelon.nn.batch import tensors_of
from echelon.parallel.observer import StepObserver


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
        """Whether both are of as many tensors, and of as many that are measured."""
        return (len(self._bits), len(self._measures)) == (len(other._bits), len(other._measures))

    def differs(self, other: "OutputPrint") -> list[Tensor]:
        """A flag for each tensor."""
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
