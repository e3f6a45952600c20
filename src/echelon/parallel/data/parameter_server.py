"""Data parallelism by a parameter server: rank 0 of the group holds the weights that count, and updates them.

    step       workers ── gradients, bucket by bucket ──▶ server, which adds them in rank order and updates
               workers ◀── weights ── server

Equal to all-reduce in what it computes, and the measure of why that one is used: here one rank receives
(N−1)Ψ and sends (N−1)Ψ per step, where a ring has every rank move 2(N−1)/N·Ψ. The server works too.

Weights are sent after the update and not when the next step starts, so that whatever happens between two
steps (an evaluation, a save) sees the same weights on every rank.
"""

from collections import deque
from typing import NamedTuple, final

import torch
from torch import Tensor

from echelon.collectives import Handle
from echelon.parallel.data.all_reduce import BUCKET_BYTES, Bucketed
from echelon.parallel.data.buckets import Bucket, fill_buckets, move_in, point_at, weight_dtype
from echelon.parallel.data.parameter_set import ParameterSet
from echelon.parallel.data.sharing import Storages, own_whole
from echelon.state.ownership import LocalParameter, OwnedSlice

SERVER = 0
_IN_FLIGHT = 2  # buckets whose gradients the server may be receiving at once


class _Arrival(NamedTuple):
    """A bucket on its way to the server: `parts` will be the workers' gradients, in rank order."""

    bucket: Bucket
    parts: list[Tensor]
    handles: list[Handle]


@final
class ParameterServer(Bucketed):
    """Ranks of which number 0 updates for all: the server owns everything, the workers nothing."""

    def __init__(self, parameter_set: ParameterSet, bucket_bytes: int = BUCKET_BYTES) -> None:
        group = parameter_set.group
        self._is_server = group.rank == SERVER
        self._workers = [rank for rank in range(group.size) if rank != SERVER]
        self._weights = fill_buckets([p for _, p in parameter_set.trained], bucket_bytes, weight_dtype)
        for bucket in self._weights:
            move_in(bucket)
        self._sends: list[Handle] = []
        self._arrivals: deque[_Arrival] = deque()
        super().__init__(parameter_set, bucket_bytes)

    def local_parameters(self) -> list[LocalParameter]:
        return self._whole if self._is_server else []

    def publish(self) -> None:
        self._send_weights()
        super().publish()

    def share_first_weights(self) -> None:
        self._send_weights()

    def owned(self) -> list[OwnedSlice]:
        return own_whole(self.parameter_set) if self._is_server else []

    def storages(self) -> Storages:
        gradients = self._gradient_buffers()
        gradients += [part for arrival in self._arrivals for part in arrival.parts]
        return Storages(list(self.parameter_set.parameters.values()), gradients)

    def reallocate(self) -> None:
        for bucket in self._weights:
            bucket.reallocate()
            point_at(bucket)

    # Gradients to the server.

    def _start_sum(self, bucket: Bucket, *, overlaps: bool) -> None:  # noqa: ARG002 (the server works meanwhile)
        with self._group.ledger.about("gradients"):
            if self._is_server:
                self._arrivals.append(self._receive(bucket))
                self._add_arrivals(at_most=_IN_FLIGHT)
            else:
                self._sends.append(self._group.send(bucket.buffer, SERVER, wait=False))

    def _receive(self, bucket: Bucket) -> _Arrival:
        parts = [torch.empty_like(bucket.buffer) for _ in self._workers]
        pairs = zip(parts, self._workers, strict=True)
        handles = [self._group.recv(part, worker, wait=False) for part, worker in pairs]
        return _Arrival(bucket, parts, handles)

    def _add_arrivals(self, at_most: int) -> None:
        """Add gradients up until `at_most` buckets are on the way; in rank order, so that sums repeat."""
        while len(self._arrivals) > at_most:
            bucket, parts, handles = self._arrivals.popleft()
            for part, handle in zip(parts, handles, strict=True):
                handle.wait()
                bucket.buffer.add_(part)

    def _finish_sums(self) -> None:
        self._add_arrivals(at_most=0)
        for send in self._sends:
            send.wait()
        self._sends = []

    # Weights to the workers.

    def _send_weights(self) -> None:
        """The server's weights to every worker, all at once, from and into the memory they live in."""
        with self._group.ledger.about("parameters"):
            moves = [
                self._group.send(bucket.buffer, worker, wait=False)
                if self._is_server
                else self._group.recv(bucket.buffer, SERVER, wait=False)
                for bucket in self._weights
                for worker in (self._workers if self._is_server else [SERVER])
            ]
        for move in moves:
            move.wait()
