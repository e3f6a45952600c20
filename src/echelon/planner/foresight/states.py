"""Bytes of model state per parameter: weights, gradients, optimizer. Adam in mixed precision with ZeRO:

level   bytes per parameter, N ranks (gradients of 2 bytes)
0       16
1       4 + 12/N
2       2 + 14/N
3       16/N
"""

from typing import NamedTuple


class StateBytes(NamedTuple):
    """Bytes that one rank holds."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    num_parameters: float,
    ranks: int = 1,
    zero: int = 0,
    *,
    weight: float = 2.0,
    gradient: float = 2.0,
    optimizer: float = 12.0,
) -> StateBytes:
    """Return the bytes of `num_parameters` whose state is sharded over `ranks` by `zero`.

    state_bytes(7.5e9, ranks=64, zero=3).total / 1e9  ->  1.875
    """
    return StateBytes(
        num_parameters * weight / (ranks if zero >= 3 else 1),
        num_parameters * gradient / (ranks if zero >= 2 else 1),
        num_parameters * optimizer / (ranks if zero >= 1 else 1),
    )
