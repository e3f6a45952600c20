"""Profiles as files: reads and writes echelon's own JSON, and reads PipeDream's graph.txt.

    {"format": "echelon-profile", "version": 1,
     "nodes": [{"name": "0", "about": "Linear", "forward_seconds": 1e-3, "backward_seconds": 2e-3,
                "output_bytes": 4096, "parameter_bytes": 65536, "stash_bytes": 8192}, …],
     "edges": [["0", "1"], …], "tied": [["0", "5"]]}

Without "edges" the nodes are a chain; without "stash_bytes" a layer stashes its output.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from echelon.errors import UserError, did_you_mean, raise_errors
from echelon.planner.graph import AMOUNTS, Node, Profile, chain, make_profile
from echelon.program.build import read_user_text
from echelon.state.bounded_json import parse_json

FORMAT, VERSION = "echelon-profile", 1
_KEYS = ("format", "version", "nodes", "edges", "tied")
_OPTIONAL = ("about", "stash_bytes")


def read_profile(path: str | Path) -> Profile:
    """The profile in a file. JSON begins with a brace; everything else is read as PipeDream's graph.txt."""
    subject = f"profile {path}"
    text = read_user_text(path, subject)
    if not text.lstrip().startswith("{"):
        return parse_graph_text(text, subject)
    try:
        value = parse_json(text.encode())
    except ValueError as error:  # also too many digits or brackets
        raise UserError(f"{subject} is not JSON: {error}") from None
    return profile_of(value, subject)


def write_profile(profile: Profile, path: str | Path) -> None:
    """Write `profile` as JSON that `read_profile` reads."""
    Path(path).write_text(json.dumps(to_dict(profile), indent=1) + "\n", encoding="utf-8")


def to_dict(profile: Profile) -> dict[str, Any]:
    """Plain values, for JSON or to send to other ranks; `profile_of` reads them."""
    names = [node.name for node in profile.nodes]
    return {
        "format": FORMAT,
        "version": VERSION,
        "nodes": [asdict(node) for node in profile.nodes],
        "edges": [[names[giver], names[taker]] for giver, taker in profile.edges],
        "tied": [list(pair) for pair in profile.tied],
    }


def profile_of(value: Mapping[str, Any], subject: str = "the profile") -> Profile:
    """The profile in plain values. Reports every error at once."""
    errors = [
        f"'{key}' is not a key of a profile{did_you_mean(key, _KEYS)}" for key in value if key not in _KEYS
    ]
    if (value.get("format"), value.get("version")) != (FORMAT, VERSION):
        errors.append(f'it must say "format": "{FORMAT}" and "version": {VERSION}')
    nodes = [
        _node(index, node, errors)
        for index, node in enumerate(_list(value.get("nodes", []), "nodes", errors))
    ]
    edges = _pairs(value.get("edges"), "edges", errors)
    tied = _pairs(value.get("tied"), "tied", errors)
    raise_errors(subject, errors)
    if "edges" not in value:
        return chain(nodes, tied, subject)
    return make_profile(nodes, edges, tied, subject)


def _list(value: Any, key: str, errors: list[str]) -> list[Any]:
    if isinstance(value, list):
        return value
    errors.append(f"{key} must be a list")
    return []


def _pairs(value: Any, key: str, errors: list[str]) -> list[tuple[str, str]]:
    pairs = [] if value is None else _list(value, key, errors)
    good = []
    for pair in pairs:
        if isinstance(pair, list) and len(pair) == 2 and all(isinstance(name, str) for name in pair):
            good.append((pair[0], pair[1]))
        else:
            errors.append(f'{key}: {json.dumps(pair)} must be two names of layers, like ["0", "1"]')
    return good


def _node(index: int, value: Any, errors: list[str]) -> Node:
    keys = ("name", *AMOUNTS, "about")
    if not isinstance(value, dict):
        errors.append(f"node {index} must be an object with {', '.join(keys)}")
        value = {}
    else:
        wrong = [
            f"node {index}: '{key}' is not a key{did_you_mean(key, keys)}" for key in value if key not in keys
        ]
        missing = [key for key in keys if key not in value and key not in _OPTIONAL]
        errors += wrong + [f"node {index}: {key} is missing" for key in missing]
    amounts = {}
    for key in (key for key in AMOUNTS if key in value):
        amount = value[key]
        if not isinstance(amount, int | float) or isinstance(amount, bool):
            errors.append(f"node {index}: {key}={json.dumps(amount)} must be a number, at least 0")
            amount = 0.0
        # An integer may be too large for a float.
        amounts[key] = float(amount) if isinstance(amount, float) or abs(amount) < 10**300 else math.inf
    stash = amounts.pop("stash_bytes", amounts.get("output_bytes", 0.0))
    filled = dict.fromkeys(AMOUNTS, 0.0) | amounts | {"stash_bytes": stash}
    return Node(name=str(value.get("name", index)), about=str(value.get("about", "")), **filled)


_GRAPH_KEYS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_GRAPH_NODE = "NAME -- description -- " + ", ".join(f"{key}=NUMBER" for key in _GRAPH_KEYS)


def parse_graph_text(text: str, subject: str = "the profile") -> Profile:
    """The profile in a graph.txt of PipeDream's profiler (github.com/msr-fiddle/pipedream).

        node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=0.0, …
        node7 -- LSTM(2048, 1024) -- forward_compute_time=3.190, …, activation_size=[6291456.0; 131072.0], …
        ⇥node1 -- node7

    Times are milliseconds, `[a; b]` are the sizes of several outputs, and lines come in any order. `Input*`
    nodes without givers and `__getitem__` nodes without takers are not layers and are left out. The files do
    not say what a layer stashes: it is taken to be its output. Reports every error at once, with its line.
    """
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
                node = _parse_node(line)
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
    pairs = [(giver, taker) for _, giver, taker in edges]
    takers = {taker for _, taker in pairs}
    inputs = {n.name for n in nodes.values() if n.about.startswith("Input") and n.name not in takers}
    pairs = [(giver, taker) for giver, taker in pairs if giver not in inputs]
    givers = {giver for giver, _ in pairs}
    unused = {n.name for n in nodes.values() if n.about.startswith("__getitem__") and n.name not in givers}
    kept = [node for node in nodes.values() if node.name not in inputs | unused]
    return make_profile(kept, [pair for pair in pairs if pair[1] not in unused], subject=subject)


def _edge(line: str) -> tuple[str, str]:
    ends = line.strip().split(" -- ")
    if len(ends) != 2:
        raise ValueError(f"'{line.strip()}' must be an edge, a tab and then GIVER -- TAKER")
    return ends[0], ends[1]


def _parse_node(line: str) -> Node:
    # PipeDream's optimizer appends the stage behind the numbers.
    line = re.sub(r" -- stage_id=\d+$", "", line.strip())
    match = re.fullmatch(r"(\S+) -- (.*) -- (\w+=.*)", line)
    if not match:
        raise ValueError(f"'{line[:40]}' must be a node, {_GRAPH_NODE}, or an edge that starts with a tab")
    name, about, rest = match.groups()
    amounts = dict(part.partition("=")[::2] for part in rest.split(", "))
    if set(amounts) != set(_GRAPH_KEYS):
        raise ValueError(f"{name} has {', '.join(amounts)}; it must have {', '.join(_GRAPH_KEYS)}")
    wrong = [f"{key}={amounts[key]}" for key in _GRAPH_KEYS if not 0 <= _sum(amounts[key]) < math.inf]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} must be numbers, at least 0, or several like [1; 2]")
    forward, backward, output, parameters = (_sum(amounts[key]) for key in _GRAPH_KEYS)
    return Node(name, forward / 1e3, backward / 1e3, output, parameters, stash_bytes=output, about=about)


def _sum(text: str) -> float:
    """'[1.5; 2]' → 3.5; NaN for what is no number."""
    try:
        numbers = text.removeprefix("[").removesuffix("]").split(";")
        return sum(map(float, numbers)) if text.isascii() else math.nan
    except ValueError:
        return math.nan
