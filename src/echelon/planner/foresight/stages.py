"""The layers of each stage: which stages differ, and how many are alike.

Layers that do not divide evenly: where embedding and head count as layers of their own and then all divide,
the first and the last stage have one less (as Megatron and BLOOM place them); else the first ones have more.
"""

from functools import lru_cache
from typing import NamedTuple

from echelon.planner.shape.shape import ModelShape


class StageKind(NamedTuple):
    """Stages that are alike: the `first` one, and how many."""

    first: int
    number: int
    dense: float  # layers without experts
    sparse: float  # layers with experts
    embedding: bool
    head: bool

    @property
    def layers(self) -> float:
        return self.dense + self.sparse


def layer_counts(layers: int, stages: int, chunks: int = 1) -> tuple[int, ...]:
    """The layers of each stage, all chunks of it together: layer_counts(126, 8, 8) == (15, 16, …, 16, 15)."""
    positions = stages * chunks
    if layers % positions and stages > 1:
        for ends in ((1, 1), (0, 1)):
            if (layers + sum(ends)) % positions == 0:
                each = (layers + sum(ends)) // stages
                return (each - ends[0], *[each] * (stages - 2), each - ends[1])
    each, rest = divmod(layers, stages)
    return tuple(each + (stage < rest) for stage in range(stages))


@lru_cache(maxsize=4096)
def stage_kinds(shape: ModelShape, stages: int, chunks: int = 1) -> tuple[StageKind, ...]:
    """The stages that differ, from the first to the last."""
    counts = layer_counts(shape.layers, stages, chunks)
    kinds: list[StageKind] = []
    first = 0
    for stage, layers in enumerate(counts):
        sparse = sum(map(shape.has_experts, range(first, first + layers)))
        first += layers
        kind = StageKind(stage, 1, layers - sparse, sparse, stage == 0, stage == stages - 1)
        if kinds and kinds[-1][2:] == kind[2:]:
            kinds[-1] = kinds[-1]._replace(number=kinds[-1].number + 1)
        else:
            kinds.append(kind)
    return tuple(kinds)
