"""A profile: what each layer of a model costs, and which layer takes whose output; where to cut it.

Plain data without torch. Layers are listed in an order in which they can run: every edge points to a later
layer. Times are seconds and sizes are bytes, both of one microbatch. `profile_file` reads and writes
profiles; `profiling` measures them.

States are what the dynamic program goes through: every set of layers that can run before the rest begins.
Such a set (an ideal of the graph) contains, with each layer, all layers that it needs. A stage is the
difference of two states, one inside the other:

    a ─► b ─┐               {} {a} {a,b} {a,c} {a,b,c} {a,b,c,d}
     └─► c ─┴─► d           from {a} to {a,b,c}: the stage of b and c, in whichever order

A chain of n layers has n + 1 states. Free layers (no time, no bytes) are left out and join the stage that
uses them first; a stage of free layers alone would leave its workers idle. A graph so wide that it has too
many states is cut along one runnable order only. That may miss the best split, so `exact` is then false.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.errors import raise_errors

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Node:
    """One layer. `stash_bytes` is what one microbatch keeps in memory until its backward pass."""

    name: str
    forward_seconds: float
    backward_seconds: float
    output_bytes: float
    parameter_bytes: float
    stash_bytes: float
    about: str = ""

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


# The fields of a node that are numbers.
AMOUNTS = tuple(field.name for field in fields(Node) if field.type is float)


@dataclass(frozen=True)
class Profile:
    """Layers in an order in which they can run, and edges as (index of giver, index of taker).

    `tied` names (first layer, later layer) for each parameter that layers share; its bytes count for the
    first. Build a profile with `make_profile` or `chain`, which check their arguments.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    tied: tuple[tuple[str, str], ...] = ()

    @property
    def seconds(self) -> float:
        """One microbatch on one device."""
        return math.fsum(node.seconds for node in self.nodes)

    @property
    def parameter_bytes(self) -> float:
        return math.fsum(node.parameter_bytes for node in self.nodes)


def chain(
    nodes: Iterable[Node], tied: Sequence[tuple[str, str]] = (), subject: str = "the profile"
) -> Profile:
    """The profile of layers that each take the output of the layer before."""
    layers = tuple(nodes)
    return make_profile(layers, [(a.name, b.name) for a, b in pairwise(layers)], tied, subject)


def make_profile(
    nodes: Sequence[Node],
    edges: Sequence[tuple[str, str]],
    tied: Sequence[tuple[str, str]] = (),
    subject: str = "the profile",
) -> Profile:
    """A profile from nodes in any order and edges by name. Reports every error at once."""
    names = {node.name for node in nodes}
    errors = _errors_of_nodes(nodes) + [
        f"{kind} {giver} -> {taker}: there is no layer {name}; list it, or drop the {kind}"
        for kind, pairs in (("edge", edges), ("tie", tied))
        for giver, taker in pairs
        for name in (giver, taker)
        if name not in names
    ]
    errors += [f"edge {a} -> {b}: a layer cannot take its own output" for a, b in edges if a == b]
    raise_errors(subject, errors)
    order = _runnable_order([node.name for node in nodes], edges)
    stuck = [node.name for node in nodes if node.name not in order]
    if stuck:
        raise_errors(subject, [f"layers {', '.join(stuck)} form a cycle: remove one of its edges"])
    by_name = {node.name: node for node in nodes}
    places = sorted({(order[giver], order[taker]) for giver, taker in edges})
    return Profile(tuple(by_name[name] for name in order), tuple(places), tuple(tied))


def _errors_of_nodes(nodes: Sequence[Node]) -> list[str]:
    errors = []
    for node in nodes:
        for amount in AMOUNTS:
            value = getattr(node, amount)
            if not (math.isfinite(value) and value >= 0):
                errors.append(f"layer {node.name}: {amount}={value} must be a finite number, at least 0")
    names = [node.name for node in nodes]
    twice = sorted({name for name in names if names.count(name) > 1})
    errors += [f"duplicate layer name '{name}'" for name in twice]
    if not nodes:
        errors.append("no layers: list at least one")
    elif not any(node.seconds for node in nodes):
        errors.append("no layer takes any time: measure forward_seconds and backward_seconds")
    return errors


def _runnable_order(names: list[str], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """The position of each name. Next comes the first in the list whose givers all have a position."""
    index_of = {name: index for index, name in enumerate(names)}
    takers: dict[str, list[str]] = {name: [] for name in names}
    waits = dict.fromkeys(names, 0)
    for giver, taker in set(edges):
        takers[giver].append(taker)
        waits[taker] += 1
    ready = [index_of[name] for name in names if waits[name] == 0]
    order: dict[str, int] = {}
    while ready:
        name = names[heapq.heappop(ready)]
        order[name] = len(order)
        for taker in takers[name]:
            waits[taker] -= 1
            if waits[taker] == 0:
                heapq.heappush(ready, index_of[taker])
    return order


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
    leaves = np.zeros(member.shape, dtype=np.bool_)  # [state, layer]: a layer outside takes its output
    for giver, taker in profile.edges:
        leaves[:, giver] |= (member[:, giver] > 0) & (member[:, taker] == 0)
    crossing = np.asarray(leaves @ amounts[:, 2], dtype=np.float64)
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
        if givers <= free and not any(getattr(node, amount) for amount in AMOUNTS):
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
