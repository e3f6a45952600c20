"""Where tokens go: the experts of each token, and how much each of them counts."""

from typing import NamedTuple

from torch import Tensor


class Routing(NamedTuple):
    """Of every token, in the order of [samples, positions]: its experts, and their weights in the sum.

    `indices` [tokens, k], int64; the number of experts where a token was dropped, whose weight is 0.
    `weights` [tokens, k].
    """

    indices: Tensor
    weights: Tensor
