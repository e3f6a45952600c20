"""Reads the `graph.txt` files of PipeDream's profiler (github.com/msr-fiddle/pipedream).

    node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=0.0, …
    node7 -- LSTM(2048, 1024) -- forward_compute_time=3.190, …, activation_size=[6291456.0; 131072.0], …
    ⇥node1 -- node7

Times are milliseconds, `[a; b]` are the sizes of several outputs, and lines come in any order. `Input*` nodes
without givers and `__getitem__` nodes without takers are not layers and are left out. The files do not say
what a layer stashes: it is taken to be its output.
"""

import math
import re
from collections.abc import Iterable

from echelon.errors import raise_errors
from echelon.planner.graph import Node, Profile, make_profile

_KEYS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_NODE = "NAME -- description -- " + ", ".join(f"{key}=NUMBER" for key in _KEYS)


def parse_graph_text(text: str, subject: str = "the profile") -> Profile:
    """The profile in the text of a graph.txt. Reports every error at once, each with its line."""
    nodes: dict[str, Node] = {}
    named: set[str] = set()  # also by lines with errors, so that their edges are not reported too
    edges: list[tuple[int, str, str]] = []
    errors: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            if line.startswith("\t"):
                edges.append((number, *_edge(line)))
            elif line.strip():
                named.add(line.split(" -- ")[0])
                node = _node(line)
                if node.name in nodes:
                    raise ValueError(f"duplicate node name '{node.name}'")
                nodes[node.name] = node
        except ValueError as error:
            errors.append(f"line {number}: {error}")
    for number, *ends in edges:
        errors += [
            f"line {number}: there is no node {name}; add its line, or remove the edge"
            for name in ends
            if name not in named
        ]
    raise_errors(subject, errors)
    return _without_ends(list(nodes.values()), [(giver, taker) for _, giver, taker in edges], subject)


def _edge(line: str) -> tuple[str, str]:
    ends = line.strip().split(" -- ")
    if len(ends) != 2:
        raise ValueError(f"'{line.strip()}' must be an edge, a tab and then GIVER -- TAKER")
    return ends[0], ends[1]


def _node(line: str) -> Node:
    # PipeDream's optimizer appends the stage behind the numbers.
    line = re.sub(r" -- stage_id=\d+$", "", line.strip())
    match = re.fullmatch(r"(\S+) -- (.*) -- (\w+=.*)", line)
    if not match:
        raise ValueError(f"'{line[:40]}' must be a node, {_NODE}, or an edge that starts with a tab")
    name, about, rest = match.groups()
    amounts = dict(part.partition("=")[::2] for part in rest.split(", "))
    if set(amounts) != set(_KEYS):
        raise ValueError(f"{name} has {', '.join(amounts)}; it must have {', '.join(_KEYS)}")
    wrong = [f"{key}={amounts[key]}" for key in _KEYS if not 0 <= _sum(amounts[key]) < math.inf]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} must be numbers, at least 0, or several like [1; 2]")
    forward, backward, output, parameters = (_sum(amounts[key]) for key in _KEYS)
    return Node(name, forward / 1e3, backward / 1e3, output, parameters, stash_bytes=output, about=about)


def _sum(text: str) -> float:
    """'[1.5; 2]' → 3.5; NaN for what is no number."""
    try:
        return sum(map(_number, text.removeprefix("[").removesuffix("]").split(";")))
    except ValueError:
        return math.nan


def _number(text: str) -> float:
    return float(text) if text.isascii() else math.nan


def _without_ends(nodes: list[Node], edges: list[tuple[str, str]], subject: str) -> Profile:
    takers = {taker for _, taker in edges}
    inputs = {n.name for n in nodes if n.about.startswith("Input") and n.name not in takers}
    edges = _without(inputs, edges)
    givers = {giver for giver, _ in edges}
    unused = {n.name for n in nodes if n.about.startswith("__getitem__") and n.name not in givers}
    kept = [node for node in nodes if node.name not in inputs | unused]
    return make_profile(kept, _without(unused, edges), subject=subject)


def _without(names: Iterable[str], edges: list[tuple[str, str]]) -> list[tuple[str, str]]:
    gone = set(names)
    return [edge for edge in edges if not gone & set(edge)]
