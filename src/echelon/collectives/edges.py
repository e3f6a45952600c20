"""Edges: messages from one rank to another, each direction between two ranks in a queue of its own.

NCCL runs all unbatched operations of one communicator in one order, over all peers: a receive that waits for
rank r−1 would hold up the send to rank r+1, on which rank r−1 may be waiting. So there each edge has a
communicator of two ranks. Gloo and shared memory keep pairs of ranks apart by themselves: one group serves
all edges.
"""

from collections.abc import Collection
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from echelon.collectives.group import Group, Handle


class Edge(NamedTuple):
    """One direction between this rank and another."""

    group: Group
    peer: int  # the other rank, as `group` numbers it
    # For bytes of the host; None where the host reads what it receives here.
    host: Optional["Edge"] = None

    def send(self, memory: Tensor, subject: str) -> Handle:
        with self.group.ledger.about(subject):
            return self.group.send(memory, self.peer, wait=False)

    def recv(self, memory: Tensor, subject: str) -> Handle:
        with self.group.ledger.about(subject):
            return self.group.recv(memory, self.peer, wait=False)


class Edges(NamedTuple):
    """The edges of one rank, by the rank at the other end."""

    outgoing: dict[int, Edge]
    incoming: dict[int, Edge]


def disjoint_pairs(pairs: Collection[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The pairs, in as few sets as a simple rule finds in which no rank appears twice."""
    sets: list[list[tuple[int, int]]] = []
    for pair in sorted(pairs):
        fitting = (each for each in sets if not any(set(pair) & set(other) for other in each))
        first = next(fitting, None)
        if first is None:
            sets.append([pair])
        else:
            first.append(pair)
    return sets


def edges_over(group: Group, device: torch.device) -> Edges:
    """The edges of a group that keeps pairs of ranks apart, for tensors on `device`."""
    others = [rank for rank in range(group.size) if rank != group.rank]
    host = device.type == "cpu"
    edges = {peer: Edge(group, peer, None if host else Edge(group, peer)) for peer in others}
    return Edges(edges, edges)
