"""Which saved numbers are never rounded: those that backward passes raise e to, or divide everything by.

    saved by             number                      in the backward pass
    attention            log of a sum of powers      exp(score - it)
    log_softmax          its result                  exp(it)
    softmax              its result                  a sum over all of a row, of which little is left
    norms                mean, 1 / deviation         a factor of a whole row

Statistics are few beside what they are of. Results of softmax are as large as scores, and known by the
operation that made them.
"""

from functools import cache
from typing import Final

from torch import Tensor

# Of a tensor, there are this many times fewer statistics.
FEWER: Final = 8

_OPERATIONS: Final = ("SoftmaxBackward", "LogsumexpBackward", "LogcumsumexpBackward", "RsqrtBackward")


def is_few(tensor: Tensor, num: int) -> bool:
    """Whether the memory of a tensor is small beside `num` numbers."""
    return FEWER * tensor.untyped_storage().nbytes() <= num * tensor.element_size()


def is_power(tensor: Tensor) -> bool:
    """Whether the operation that made a tensor computes with its result again."""
    made_by = tensor.grad_fn
    return made_by is not None and _is_listed(made_by.name())


@cache
def _is_listed(name: str) -> bool:
    return any(each in name for each in _OPERATIONS)
