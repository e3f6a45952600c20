"""The formulas of the cost models written out once more, plainly, over every split there is."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil, inf
from typing import NamedTuple

from hypothesis import strategies as st

from echelon.planner import Node, Profile, make_profile


class Case(NamedTuple):
    profile: Profile
    model: str
    microbatches: int
    free: bool
    memory: float


def fastest(case: Case, workers: Sequence[int], bandwidths: Sequence[float]) -> float:
    """The least time over all splits and all levels."""
    everything = frozenset(range(len(case.profile.nodes)))
    return _unit(case, workers, bandwidths, len(workers) - 1, frozenset(), everything, 0.0)


def is_chain(profile: Profile) -> bool:
    return set(profile.edges) == set(pairwise(range(len(profile.nodes))))


def ideals(profile: Profile) -> list[frozenset[int]]:
    places = range(len(profile.nodes))
    sets = [frozenset(p for p in places if bits >> p & 1) for bits in range(2 ** len(places))]
    return [s for s in sets if all(giver in s for giver, taker in profile.edges if taker in s)]


def _unit(
    case: Case,
    workers: Sequence[int],
    bandwidths: Sequence[float],
    depth: int,
    begin: frozenset[int],
    end: frozenset[int],
    outside: float,
) -> float:
    """One unit of a level does the layers between two ideals; -1 is below the innermost level."""
    nodes, rate = case.profile.nodes, bandwidths[depth]
    if depth < 0:
        return sum(nodes[place].seconds for place in end - begin)
    inside = 1
    for count in workers[:depth]:
        inside *= count
    ranks = 1
    for count in workers:
        ranks *= count
    best = inf
    for cuts, replicas in _splits(case.profile, begin, end, workers[depth]):
        slowest = 0.0
        for index, ((a, b), r) in enumerate(zip(pairwise(cuts), replicas, strict=True)):
            behind = sum(replicas[index + 1 :])
            later = (outside + behind * inside) / r
            compute = _unit(case, workers, bandwidths, depth - 1, a, b, later)
            if _memory(case, a, b, behind / r, later, inside) > case.memory:
                compute = inf
            w = sum(nodes[place].parameter_bytes for place in b - a)
            if case.model == "pipedream":
                slowest = max(slowest, (compute + 4 * (r - 1) * w / (rate * r) / inside) / r)
            else:
                ring = 2 * (r - 1) / r * w / rate
                slowest = max(slowest, compute / r, ring / (case.microbatches or ranks))
            if case.free or index == 0:
                continue
            narrow = r if case.model == "pipedream" else min(r, replicas[index - 1])
            slowest = max(slowest, 2 * _crossing(case.profile, a) / (rate * narrow))
        best = min(best, slowest)
    return best


def _memory(
    case: Case, a: frozenset[int], b: frozenset[int], rounds: float, later: float, inside: int
) -> float:
    nodes = [case.profile.nodes[place] for place in b - a]
    parameters = sum(node.parameter_bytes for node in nodes)
    if case.model == "pipedream":
        return ceil(rounds) * (parameters + sum(node.output_bytes for node in nodes))
    if inside > 1:
        return 0.0
    stash = sum(node.stash_bytes for node in nodes) + _crossing(case.profile, a)
    return 4 * parameters + (1 + ceil(later - 1e-9)) * stash


def _crossing(profile: Profile, done: frozenset[int]) -> float:
    givers = {giver for giver, taker in profile.edges if giver in done and taker not in done}
    return sum(profile.nodes[giver].output_bytes for giver in givers)


def _splits(
    profile: Profile, begin: frozenset[int], end: frozenset[int], workers: int
) -> Iterator[tuple[list[frozenset[int]], list[int]]]:
    """Every chain of ideals from one to the other, with replicas that are all the workers.

    Layers that cost nothing make no stage: it would be a way to leave workers idle.
    """
    if workers == 0:
        if begin == end:
            yield [end], []
        return
    for middle in ideals(profile):
        if begin < middle <= end and not middle - begin <= _free(profile):
            for replicas in range(1, workers + 1):
                for cuts, rest in _splits(profile, middle, end, workers - replicas):
                    yield [begin, *cuts], [replicas, *rest]


def _free(profile: Profile) -> set[int]:
    """Layers that cost nothing and need only such layers."""
    free: set[int] = set()
    for place, node in enumerate(profile.nodes):
        costs = (node.seconds, node.output_bytes, node.parameter_bytes, node.stash_bytes)
        if not any(costs) and {giver for giver, taker in profile.edges if taker == place} <= free:
            free.add(place)
    return free


_amounts = st.integers(0, 9).map(float)


@st.composite
def profiles(draw: st.DrawFn, most: int = 5) -> Profile:
    """Small graphs of every shape, with costs that often tie and free layers among them."""
    count = draw(st.integers(1, most))
    costs = st.one_of(st.tuples(*[_amounts] * 5), st.just((0.0,) * 5))
    nodes = [Node(str(place), *draw(costs)) for place in range(count)]
    nodes[-1] = Node("last", 1.0, draw(_amounts), *(draw(_amounts) for _ in range(3)))
    names = [node.name for node in nodes]
    pairs = [(a, b) for place, b in enumerate(names) for a in names[:place]]
    edges = [pair for pair in pairs if draw(st.booleans())]
    order = draw(st.permutations(range(count)))
    return make_profile([nodes[place] for place in order], edges)
