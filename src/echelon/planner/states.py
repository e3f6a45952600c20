"""The states of the dynamic program: every set of layers that can run before the rest begins.

Such a set (an ideal of the graph) contains, with each layer, all layers that it needs. A stage is the
difference of two states, one inside the other:

    a ─► b ─┐               {} {a} {a,b} {a,c} {a,b,c} {a,b,c,d}
     └─► c ─┴─► d           from {a} to {a,b,c}: the stage of b and c, in whichever order

A chain of n layers has n + 1 states. Free layers (no time, no bytes) are left out and join the stage that
uses them first; a stage of free layers alone would leave its workers idle. A graph so wide that it has too
many states is cut along one runnable order only. That may miss the best split, so `exact` is then false.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.planner.graph import Profile

Floats = NDArray[np.float64]


class States(NamedTuple):
    """Per state, smallest first: its layers as bits, sums over them, and the bytes that leave it.

    `nested[i, k]`: state i is inside state k, so a stage may go from one to the other. `crossing` counts each
    output once, however many layers outside take it.
    """

    masks: tuple[int, ...]
    seconds: Floats
    parameters: Floats
    outputs: Floats
    stash: Floats
    crossing: Floats
    nested: NDArray[np.bool_]
    exact: bool

    def between(self, sums: Floats) -> Floats:
        """[i, k]: the sum over the layers from state i to state k, of any sum above."""
        return np.maximum(sums[None, :] - sums[:, None], 0.0)


def find_states(profile: Profile, limit: int) -> States:
    """The states of a profile's graph, at most `limit` of them."""
    count = len(profile.nodes)
    layers = _costly_layers(profile)
    needs = [0] * count
    for giver, taker in profile.edges:
        needs[taker] |= 1 << giver
    # A chain of any length has its states; only branches multiply them.
    masks = _ideals(layers, [need & _bits(layers) for need in needs], max(limit, count + 1))
    exact = masks is not None
    if masks is None:
        masks = [_bits(layers[:end]) for end in range(len(layers) + 1)]
    member = np.array([[mask >> place & 1 for place in range(count)] for mask in masks], dtype=np.float64)
    amounts = np.array([[n.seconds, n.parameter_bytes, n.output_bytes, n.stash_bytes] for n in profile.nodes])
    outside = member @ (1 - member).T  # [i, k]: layers of i that k lacks
    nested = (outside == 0) & ~np.eye(len(masks), dtype=np.bool_)
    seconds, parameters, outputs, stash = (member @ amounts).T
    crossing = _crossing(profile, member)
    return States(tuple(masks), seconds, parameters, outputs, stash, crossing, nested, exact)


def stage_of_layers(profile: Profile, masks: list[int]) -> list[int]:
    """The stage of each layer, where stage s ends at state `masks[s]`. Free layers join their first taker."""
    last = len(masks) - 1
    stages = [
        next((stage for stage, mask in enumerate(masks) if mask >> place & 1), last)
        for place in range(len(profile.nodes))
    ]
    free = set(range(len(profile.nodes))) - set(_costly_layers(profile))
    for place in sorted(free, reverse=True):  # takers before givers
        stages[place] = min((stages[taker] for giver, taker in profile.edges if giver == place), default=last)
    return stages


def _costly_layers(profile: Profile) -> list[int]:
    """All layers except those that are free and need only free layers."""
    free: set[int] = set()
    for place, node in enumerate(profile.nodes):
        givers = {giver for giver, taker in profile.edges if taker == place}
        if node.is_free and givers <= free:
            free.add(place)
    return [place for place in range(len(profile.nodes)) if place not in free]


def _bits(places: list[int]) -> int:
    return sum(1 << place for place in places)


def _ideals(layers: list[int], needs: list[int], limit: int) -> list[int] | None:
    """Every ideal, by size and then by its bits; None when there are more than `limit`."""
    ideals, newest = [0], [0]
    while newest:
        larger = {
            mask | 1 << place
            for mask in newest
            for place in layers
            if not mask >> place & 1 and not needs[place] & ~mask
        }
        newest = sorted(larger)
        ideals += newest
        if len(ideals) > limit:
            return None
    return ideals


def _crossing(profile: Profile, member: Floats) -> Floats:
    """Per state, the bytes of the outputs that a layer outside takes."""
    leaves = np.zeros(member.shape, dtype=np.bool_)
    for giver, taker in profile.edges:
        leaves[:, giver] |= (member[:, giver] > 0) & (member[:, taker] == 0)
    sizes = np.array([node.output_bytes for node in profile.nodes])
    return np.asarray(leaves @ sizes, dtype=np.float64)
