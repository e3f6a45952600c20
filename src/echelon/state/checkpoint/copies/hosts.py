"""Whose copy goes where: from each rank to one of the next host, and back to a rank that has lost its file.

hosts      a  a  b  b  c  c
rank       0  1  2  3  4  5
its copy   2  3  4  5  0  1
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Found = Mapping[str, Sequence[int]]  # by generation, the ranks whose files are there


class Sending(NamedTuple):
    """A file of rank `receiver`, which the rank `sender` has on its host."""

    sender: int
    receiver: int


def receivers(hosts: Sequence[str]) -> list[int | None]:
    """By rank, the rank that keeps its copy; None where all ranks are on one host."""
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return [None] * len(hosts)
    members = {name: [rank for rank, host in enumerate(hosts) if host == name] for name in names}
    chosen: list[int | None] = []
    for rank, host in enumerate(hosts):
        following = members[names[(names.index(host) + 1) % len(names)]]
        chosen.append(following[members[host].index(rank) % len(following)])
    return chosen


def whole_generations(found: Sequence[Found]) -> list[str]:
    """Those of which some host has the file of every rank, newest first; `found` by rank, on its host."""
    names = sorted({name for of_rank in found for name in of_rank}, reverse=True)
    ranks = set(range(len(found)))
    return [name for name in names if ranks <= {rank for each in found for rank in each.get(name, ())}]


def sendings(generation: str, found: Sequence[Found]) -> list[Sending]:
    """How each rank without its file gets it."""
    holders = [set(of_rank.get(generation, ())) for of_rank in found]
    return [
        Sending(next(other for other, held in enumerate(holders) if rank in held), rank)
        for rank, here in enumerate(holders)
        if rank not in here
    ]
