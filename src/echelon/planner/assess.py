"""What each stage of a split takes, from the layers themselves: levels are folded into flat stages.

The programme compares differences of sums; here every stage is summed anew, so that a stage's figures and the
pipeline's time agree to the last digit with the formulas.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from echelon.planner.cluster import Level
from echelon.planner.cost import Bytes, Place
from echelon.planner.graph import Node, Profile
from echelon.planner.result import Stage
from echelon.planner.solver import Piece, Problem
from echelon.planner.states import stage_of_layers


@dataclass(frozen=True)
class _Draft:
    """A stage as seen from inside one unit of a level: its times are those of the unit."""

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
            tuple(node.name for node, its in zip(profile.nodes, stages, strict=True) if its == index),
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
        """The stages of one unit of level `depth`. `firsts` are the first ranks of the unit's copies."""
        level = self._problem.levels[depth]
        drafts: list[_Draft] = []
        taken = 0
        for index, piece in enumerate(pieces):
            place = piece.place._replace(outside=outside)
            ranks = tuple(
                first + (taken + worker) * level.inside
                for first in firsts
                for worker in range(place.replicas)
            )
            taken += place.replicas
            if depth:
                inner = self.unit(depth - 1, piece.inner, ranks, place.ranks_behind(level))
            else:
                compute = self._sum(piece, lambda node: node.seconds)
                inner = [_Draft(piece.end, compute, compute, workers=ranks)]
            inner = [self._replicated(draft, piece, place, level) for draft in inner]
            if index > 0:
                inner[0] = self._passing(inner[0], piece.begin, place, level)
            if index < len(pieces) - 1 and self._problem.model.sender_pays:
                inner[-1] = self._passing(inner[-1], piece.end, place, level)
            drafts += inner
        return drafts

    def _replicated(self, draft: _Draft, piece: Piece, place: Place, level: Level) -> _Draft:
        """`draft` on several workers of a level, whose gradients are exchanged there."""
        model, replicas = self._problem.model, place.replicas
        held = self._bytes(piece)
        exchange = model.exchange(held.parameters, replicas, level)
        return replace(
            draft,
            seconds=float(model.join(draft.seconds / replicas, exchange)),
            compute=draft.compute / replicas,
            gradients=float(model.join(draft.gradients / replicas, exchange)),
            activations=draft.activations / replicas,
            memory=max(draft.memory, float(model.memory(held, place, level))),
        )

    def _passing(self, draft: _Draft, state: int, place: Place, level: Level) -> _Draft:
        """`draft` with the activations that pass at `state`."""
        size = float(self._problem.states.crossing[state])
        seconds = float(self._problem.model.transfer(size, place.replicas, level))
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
            amount(node) for place, node in enumerate(self._profile.nodes) if within >> place & 1
        )
