"""Data parallelism by a parameter server: replica 0 holds the authoritative weights and the only optimizer.

    step       workers ── gradients, bucket by bucket ──▶ server, which adds them in rank order and updates
               workers ◀── weights ── server

Equal to all-reduce in what it computes, and the measure of why that one is used: here one rank receives
(N−1)Ψ and sends (N−1)Ψ a step, where a ring has every rank move 2(N−1)/N·Ψ. The server works too.

Weights are sent after the update and not when the next step starts, so that whatever happens between two
steps (an evaluation, a save) sees the same weights on every rank.
"""

from collections import deque
from collections.abc import Set
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.collectives import Group, Handle
from echelon.data_parallel.bucketed import BUCKET_BYTES, Bucketed
from echelon.data_parallel.buckets import Bucket, fill_buckets
from echelon.data_parallel.buffers import broadcast
from echelon.data_parallel.sync import NOTHING, Storages, held_gradients, own_module
from echelon.ownership import Held, Owned, Slice, whole_slice

SERVER = 0
_IN_FLIGHT = 2  # buckets whose gradients the server may be receiving at once


class _Arrival(NamedTuple):
    """A bucket on its way to the server: `parts` will be the workers' gradients, in rank order."""

    bucket: Bucket
    parts: list[Tensor]
    handles: list[Handle]


@final
class ParameterServer(Bucketed):
    """Replicas along `group`, of which number 0 updates for all."""

    sharded = True  # the server owns everything, the workers nothing

    def __init__(self, module: nn.Module, group: Group, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._serves = group.rank == SERVER
        self._workers = [rank for rank in range(group.size) if rank != SERVER]
        self._weights = fill_buckets([p for p in module.parameters() if p.requires_grad], bucket_bytes)
        for bucket in self._weights:
            move_in(bucket)
        self._sends: list[Handle] = []
        self._arrivals: deque[_Arrival] = deque()
        super().__init__(module, group, bucket_bytes)

    def held(self) -> list[Held]:
        return self._trained if self._serves else []

    def norm_share(self, without: Set[nn.Parameter] = NOTHING) -> list[Tensor]:
        return held_gradients(self.held(), without)  # none on workers

    def finish_step(self) -> None:
        self._share_weights()
        super().finish_step()

    def owned(self) -> list[Owned]:
        return own_module(self._module, replicated=()) if self._serves else []

    def slices(self, held: Held) -> list[Slice]:
        return [whole_slice(held.name, held.parameter, replicated=())]

    def storages(self) -> Storages:
        gradients = [bucket.buffer for bucket in self._buckets]
        gradients += [part for arrival in self._arrivals for part in arrival.parts]
        return Storages(list(self._module.parameters()), gradients)

    def renew(self) -> None:
        for bucket in self._weights:
            bucket.renew()
            point_at(bucket)

    # Gradients to the server.

    def _reduce(self, bucket: Bucket) -> None:
        with self._group.ledger.about("gradients"):
            if self._serves:
                self._arrivals.append(self._receive(bucket))
                self._add_arrivals(at_most=_IN_FLIGHT)
            else:
                self._sends.append(self._group.send(bucket.buffer, SERVER, wait=False))

    def _receive(self, bucket: Bucket) -> _Arrival:
        parts = [torch.empty_like(bucket.buffer) for _ in self._workers]
        handles = [
            self._group.recv(part, worker, wait=False)
            for part, worker in zip(parts, self._workers, strict=True)
        ]
        return _Arrival(bucket, parts, handles)

    def _add_arrivals(self, at_most: int) -> None:
        """Add gradients up until `at_most` buckets are on the way; in rank order, so that sums repeat."""
        while len(self._arrivals) > at_most:
            bucket, parts, handles = self._arrivals.popleft()
            for part, handle in zip(parts, handles, strict=True):
                handle.wait()
                bucket.buffer.add_(part)

    def _complete(self) -> None:
        """Wait for all gradients that are on the way."""
        self._add_arrivals(at_most=0)
        for send in self._sends:
            send.wait()
        self._sends = []

    # Weights to the workers.

    def _start_equal(self) -> None:
        self._share_weights()
        with self._group.ledger.about("parameters"):
            for parameter in self._module.parameters():
                if not parameter.requires_grad:
                    broadcast(parameter, self._group)

    def _share_weights(self) -> None:
        """The server's weights to every worker, all at once, from and into the memory they live in."""
        with self._group.ledger.about("parameters"):
            moves = [
                self._group.send(bucket.buffer, worker, wait=False)
                if self._serves
                else self._group.recv(bucket.buffer, SERVER, wait=False)
                for bucket in self._weights
                for worker in (self._workers if self._serves else [SERVER])
            ]
        for move in moves:
            move.wait()


def move_in(bucket: Bucket) -> None:
    """Copy every parameter into the bucket and make it a view of its place there."""
    for parameter, view in bucket.views.items():
        view.copy_(parameter.detach())
    point_at(bucket)


def point_at(bucket: Bucket) -> None:
    """Make every parameter a view of its place in the bucket."""
    for parameter, view in bucket.views.items():
        parameter.data = view
