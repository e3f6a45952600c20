"""Data parallelism by all-reduce (DDP): replicas hold everything and sum their gradients, bucket by bucket.

A bucket's all-reduce starts as soon as the last microbatch's backward pass has completed it, while the
backward pass goes on. Earlier microbatches only accumulate: one synchronisation a step.
"""

from collections.abc import Set
from typing import final

from torch import Tensor, nn

from echelon.collectives import Group, Handle
from echelon.data_parallel.bucketed import BUCKET_BYTES, Bucketed
from echelon.data_parallel.buckets import Bucket
from echelon.data_parallel.buffers import broadcast
from echelon.data_parallel.sync import NOTHING, Storages, held_gradients, own_module
from echelon.ownership import Held, Owned, Slice, whole_slice


@final
class AllReduce(Bucketed):
    """Replicas along `group` that sum gradients; replica 0's weights and buffers are the start."""

    sharded = False

    def __init__(self, module: nn.Module, group: Group, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._reductions: list[Handle] = []
        super().__init__(module, group, bucket_bytes)

    def held(self) -> list[Held]:
        return self._trained

    def norm_share(self, without: Set[nn.Parameter] = NOTHING) -> list[Tensor]:
        # Every rank has every gradient: each takes one part of each bucket, and reads 1/N of the memory.
        whole = [bucket.buffer for bucket in self._buckets]
        strayed = any(p.grad is not None and p.grad is not b.views[p] for b in self._buckets for p in b.views)
        if without or strayed:
            whole = [gradient.flatten() for gradient in held_gradients(self._trained, without)]
        return [gradient.tensor_split(self._group.size)[self._group.rank] for gradient in whole]

    def owned(self) -> list[Owned]:
        return own_module(self._module, replicated=("data",))

    def slices(self, held: Held) -> list[Slice]:
        return [whole_slice(held.name, held.parameter, replicated=("data",))]

    def storages(self) -> Storages:
        return Storages(list(self._module.parameters()), [bucket.buffer for bucket in self._buckets])

    def _start_equal(self) -> None:
        with self._group.ledger.about("parameters"):
            for parameter in self._module.parameters():
                broadcast(parameter, self._group)

    def _reduce(self, bucket: Bucket) -> None:
        with self._group.ledger.about("gradients"):
            self._reductions.append(self._group.all_reduce(bucket.buffer, wait=False))

    def _complete(self) -> None:
        for reduction in self._reductions:
            reduction.wait()
        self._reductions = []
