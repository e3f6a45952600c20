"""Profiles as files: reads and writes echelon's own JSON, and reads PipeDream's graph.txt.

    {"format": "echelon-profile", "version": 1,
     "nodes": [{"name": "0", "about": "Linear", "forward_seconds": 1e-3, "backward_seconds": 2e-3,
                "output_bytes": 4096, "parameter_bytes": 65536, "stash_bytes": 8192}, …],
     "edges": [["0", "1"], …], "tied": [["0", "5"]]}

Without "edges" the nodes are a chain; without "stash_bytes" a layer stashes its output.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from echelon.errors import UserError, did_you_mean, raise_errors
from echelon.planner.graph import AMOUNTS, Node, Profile, chain, make_profile
from echelon.planner.graph_text import parse_graph_text
from echelon.program.load import read_text_file
from echelon.state.bounded_json import parse_json

FORMAT, VERSION = "echelon-profile", 1
_KEYS = ("format", "version", "nodes", "edges", "tied")
_OPTIONAL = ("about", "stash_bytes")


def read_profile(path: str | Path) -> Profile:
    """The profile in a file. JSON begins with a brace; everything else is read as PipeDream's graph.txt."""
    try:
        text = read_text_file(Path(path))
    except UnicodeDecodeError:
        raise UserError(f"profile {path} is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"profile {path} cannot be read: {error.strerror or error}") from None
    subject = f"profile {path}"
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
    amounts = {key: _amount(index, key, value[key], errors) for key in AMOUNTS if key in value}
    stash = amounts.pop("stash_bytes", amounts.get("output_bytes", 0.0))
    filled = dict.fromkeys(AMOUNTS, 0.0) | amounts | {"stash_bytes": stash}
    return Node(name=str(value.get("name", index)), about=str(value.get("about", "")), **filled)


def _amount(index: int, key: str, value: Any, errors: list[str]) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        # An integer may be too large for a float.
        return float(value) if isinstance(value, float) or abs(value) < 10**300 else math.inf
    errors.append(f"node {index}: {key}={json.dumps(value)} must be a number, at least 0")
    return 0.0
