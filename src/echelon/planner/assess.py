"""The time and memory of each stage of a split; the levels of a cluster become one list of stages.

The solver works with differences of prefix sums. Here every stage is summed again from its layers, so that
the figures agree with the formulas to the last digit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from echelon.planner.cluster import Level
from echelon.planner.cost import Bytes, StagePosition
from echelon.planner.graph import Node, Profile
from echelon.planner.result import Stage
from echelon.planner.solver import Piece, Problem
from echelon.planner.states import stage_of_layers


@dataclass(frozen=True)
class _Draft:
    """A stage as seen from one unit of a level: the times are those of the unit."""

    end: int
    seconds: float
    compute: float
    gradients: float = 0.0
    activations: float = 0.0
    memory: float = 0.0
    workers: tuple[int, ...] = ()


def assess(problem: Problem, profile: Profile, pieces: tuple[Piece, ...]) -> tuple[Stage, ...]:
    """The stages of a split in the order of the pipeline, over all levels."""
    drafts = _Assessor(problem, profile).unit(len(problem.levels) - 1, pieces, (0,), 0.0)
    stages = stage_of_layers(profile, [problem.states.masks[draft.end] for draft in drafts])
    return tuple(
        Stage(
            tuple(node.name for node, stage in zip(profile.nodes, stages, strict=True) if stage == index),
            len(draft.workers),
            draft.seconds,
            draft.compute,
            draft.gradients,
            draft.activations,
            draft.memory,
            draft.workers,
        )
        for index, draft in enumerate(drafts)
    )


class _Assessor:
    def __init__(self, problem: Problem, profile: Profile) -> None:
        self._problem, self._profile = problem, profile

    def unit(
        self, depth: int, pieces: tuple[Piece, ...], firsts: tuple[int, ...], outside: float
    ) -> list[_Draft]:
        """The stages of one unit of level `depth`. `firsts` are the first ranks of the copies of the unit."""
        level = self._problem.levels[depth]
        drafts: list[_Draft] = []
        taken = 0
        for index, piece in enumerate(pieces):
            position = piece.position._replace(outside=outside)
            ranks = tuple(
                first + (taken + worker) * level.inside
                for first in firsts
                for worker in range(position.replicas)
            )
            taken += position.replicas
            if depth:
                inner = self.unit(depth - 1, piece.inner, ranks, position.ranks_behind(level))
            else:
                compute = self._sum(piece, lambda node: node.seconds)
                inner = [_Draft(piece.end, compute, compute, workers=ranks)]
            inner = [self._replicated(draft, piece, position, level) for draft in inner]
            if index > 0:
                inner[0] = self._with_transfer(inner[0], piece.begin, position, level)
            if index < len(pieces) - 1 and self._problem.model.sender_pays:
                inner[-1] = self._with_transfer(inner[-1], piece.end, position, level)
            drafts += inner
        return drafts

    def _replicated(self, draft: _Draft, piece: Piece, position: StagePosition, level: Level) -> _Draft:
        """`draft` on several workers of a level, which exchange their gradients."""
        model, replicas = self._problem.model, position.replicas
        size = self._bytes(piece)
        exchange = model.exchange(size.parameters, replicas, level)
        return replace(
            draft,
            seconds=float(model.join(draft.seconds / replicas, exchange)),
            compute=draft.compute / replicas,
            gradients=float(model.join(draft.gradients / replicas, exchange)),
            activations=draft.activations / replicas,
            memory=max(draft.memory, float(model.memory(size, position, level))),
        )

    def _with_transfer(self, draft: _Draft, state: int, position: StagePosition, level: Level) -> _Draft:
        """`draft` with the activations that cross the split at `state`."""
        size = float(self._problem.states.crossing[state])
        seconds = float(self._problem.model.transfer(size, position.replicas, level))
        return replace(
            draft, seconds=max(draft.seconds, seconds), activations=max(draft.activations, seconds)
        )

    def _bytes(self, piece: Piece) -> Bytes:
        return Bytes(
            self._sum(piece, lambda node: node.parameter_bytes),
            self._sum(piece, lambda node: node.output_bytes),
            self._sum(piece, lambda node: node.stash_bytes),
            float(self._problem.states.crossing[piece.begin]),
        )

    def _sum(self, piece: Piece, amount: Callable[[Node], float]) -> float:
        masks = self._problem.states.masks
        within = masks[piece.end] & ~masks[piece.begin]
        return math.fsum(
            amount(node) for position, node in enumerate(self._profile.nodes) if within >> position & 1
        )
