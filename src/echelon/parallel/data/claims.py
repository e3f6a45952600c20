"""Claims: which engine trains a parameter, and which parameters it does not train.

A later engine takes the parameters over, and the earlier one may not train them any more: its buckets, its
shards and its optimizer would go on with weights of their own. Parameters that were frozen at the start are
in no bucket and no optimizer, so they must stay frozen; one that is frozen later just gets no gradients.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from echelon.errors import UserError


class Claim:
    """The parameters of one set, by name; asked once per step."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._frozen = [(name, p) for name, p in parameters.items() if not p.requires_grad]
        self._lost: str | None = None  # the first parameter that a later engine has taken
        for parameter in parameters.values():
            previous = _holder(parameter)
            if previous is not None:
                previous._lost = previous._lost or previous._names[parameter]
            _holders[parameter] = ref(self)

    def check(self) -> None:
        """Raise if this engine cannot train its parameters as it began."""
        if self._lost is not None:
            raise UserError(
                f"{self._lost} is trained by a later engine over the same model, and this one would go on "
                "with weights of its own; use the later one, and close an engine with engine.close() before "
                "parallelize makes another"
            )
        with torch._C.DisableTorchFunctionSubclass():  # a freed parameter need not be asked
            trained = [name for name, parameter in self._frozen if parameter.requires_grad]
        if trained:
            raise UserError(
                f"{_listed(trained)} had requires_grad=False when parallelize was called, and this engine's "
                "optimizer has no state for it; to train it, call engine.close(), set requires_grad, and "
                "make another engine with parallelize"
            )

    def holds(self, parameter: nn.Parameter) -> bool:
        return _holder(parameter) is self

    def release(self) -> None:
        """The engine is closed."""
        for parameter in self._names:
            if self.holds(parameter):
                del _holders[parameter]


def is_claimed(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether an engine that is not closed trains any of these."""
    return any(_holder(parameter) is not None for parameter in parameters)


# The claim that holds each parameter.
_holders: MutableMapping[Tensor, "ref[Claim]"] = WeakIdKeyDictionary()


def _holder(parameter: nn.Parameter) -> Claim | None:
    reference = _holders.get(parameter)
    return None if reference is None else reference()


def _listed(names: list[str]) -> str:
    """'a, b, c and 9 more'."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
