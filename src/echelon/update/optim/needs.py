"""The part of a parameter that an optimizer must see to update it.

    element   each element alone: a rank can update any run of elements        AdamW, SGD
    sums      sums over rows, columns or all of it: ranks add up theirs        Adafactor and SM3 of echelon
    whole     the whole tensor, on one rank                                    Muon, LAMB, LARS

An optimizer of yours says it by an attribute, `needs = "whole"`.
"""

from collections.abc import Sequence
from enum import StrEnum

import torch

from echelon.errors import UserError


class Need(StrEnum):
    """In the order of how much must be on one rank."""

    ELEMENT = "element"
    SUMS = "sums"
    WHOLE = "whole"


# The optimizers of torch whose update of an element depends only on the history of that element.
_ELEMENTWISE = "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD"
_WHOLE = "Adafactor Muon"  # those that need one whole parameter at a time


def need_of(optimizer: torch.optim.Optimizer) -> Need | None:
    """Return what an optimizer needs, as it declares or as torch's are known to; None if it is unknown."""
    declared = getattr(optimizer, "needs", None)
    if declared is not None:
        return _declared(optimizer, declared)
    if works_by_element(optimizer) or getattr(optimizer, "elementwise", False):
        return Need.ELEMENT
    return Need.WHOLE if _is_torch_s(optimizer, _WHOLE) else None


def inner_optimizers(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Return the optimizers of a CombinedOptimizer, or the optimizer itself."""
    inside: Sequence[torch.optim.Optimizer] = getattr(optimizer, "optimizers", (optimizer,))
    return inside


def works_by_element(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `optimizer` is one of torch's own that treat every element alike."""
    return _is_torch_s(optimizer, _ELEMENTWISE)


def check_parts(optimizer: torch.optim.Optimizer, plan: str) -> None:
    """Refuse an optimizer whose needs are unknown, where ranks hold parts of parameters."""
    if need_of(optimizer) is None:
        name = type(optimizer).__name__
        raise UserError(
            f"optimizer {name} with {plan}: each rank holds parts of parameters, and nobody knows what it "
            'needs of them; set `needs = "element"` on its class if it treats every element alike, or '
            '`needs = "whole"` if it looks at one whole parameter at a time; or use zero=0, '
            "tensor=1 and expert=1"
        )


def _declared(optimizer: torch.optim.Optimizer, declared: object) -> Need:
    name = type(optimizer).__name__
    if declared not in list(Need):
        raise UserError(f"optimizer {name} has needs={declared!r}: must be 'element' or 'whole'")
    if declared == Need.SUMS and not hasattr(optimizer, "share"):
        raise UserError(
            f"optimizer {name} has needs='sums': only a subclass of echelon.optim.SumOptimizer can add up "
            "sums over ranks; use needs='whole'"
        )
    return Need(str(declared))


def _is_torch_s(optimizer: torch.optim.Optimizer, names: str) -> bool:
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and kind.__name__ in names.split()
