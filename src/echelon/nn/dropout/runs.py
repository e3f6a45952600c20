"""Which elements of a sample are on this rank: runs of consecutive ones, all of one length."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Runs(NamedTuple):
    """Run r begins, among the elements of the whole sample, at

        ((indices[r // inner] · inner + r % inner) · ranks + rank) · length

    where `indices` are those of dim 1 (0, 1, 2 … if all of it is here). Every begin is a multiple of the
    length.
    """

    num_runs: int
    length: int
    inner: int = 1
    rank: int = 0
    ranks: int = 1

    @property
    def has_whole_words(self) -> bool:
        """Whether no hash of two neighbouring elements decides for two runs."""
        return self.length % 2 == 0


def runs_of(shape: Sequence[int], *, has_indices: bool, feature_part: tuple[int, int] | None) -> Runs:
    """The runs of a sample, for elements of `shape` whose dim 0 counts samples.

    runs_of((8, 5, 6), has_indices=True, feature_part=None)         # 5 runs of 6 elements
    """
    if feature_part is not None:
        assert len(shape) > 1, "the last dim counts features, and not samples"
        return Runs(prod(shape[1:-1]), shape[-1], prod(shape[2:-1]), *feature_part)
    return Runs(shape[1], prod(shape[2:])) if has_indices else Runs(1, prod(shape[1:]))
