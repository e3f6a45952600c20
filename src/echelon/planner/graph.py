"""A profile: what each layer of a model costs, and which layer takes the output of which.

Plain data without torch. Layers are listed in an order in which they can run: every edge points to a later
layer. Times are seconds and sizes are bytes, both of one microbatch. `profile_file` and `graph_text` read and
write profiles; `profiling` measures them.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from echelon.errors import raise_errors


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

    @property
    def is_free(self) -> bool:
        """Whether the layer costs nothing on any stage."""
        return not any((self.seconds, self.output_bytes, self.parameter_bytes, self.stash_bytes))


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

    @property
    def is_chain(self) -> bool:
        return set(self.edges) == set(pairwise(range(len(self.nodes))))


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
    errors = [*_errors_of_nodes(nodes), *_errors_of_edges(nodes, edges, tied)]
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


def _errors_of_edges(
    nodes: Sequence[Node], edges: Sequence[tuple[str, str]], tied: Sequence[tuple[str, str]]
) -> list[str]:
    names = {node.name for node in nodes}
    errors = [
        f"{kind} {giver} -> {taker}: there is no layer {name}; list it, or drop the {kind}"
        for kind, pairs in (("edge", edges), ("tie", tied))
        for giver, taker in pairs
        for name in (giver, taker)
        if name not in names
    ]
    return errors + [f"edge {a} -> {b}: a layer cannot take its own output" for a, b in edges if a == b]


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
