"""Data parallelism by all-reduce (DDP): ranks hold everything and sum their gradients, bucket by bucket.

A bucket's all-reduce starts as soon as the last microbatch's backward pass has completed it, while the
backward pass goes on. Earlier microbatches only accumulate: one synchronisation per step.
"""

from typing import final

from torch import Tensor

from echelon.collectives import Handle
from echelon.parallel.data.bucketed import BUCKET_BYTES, Bucketed
from echelon.parallel.data.buckets import Bucket
from echelon.parallel.data.parameter_set import ParameterSet
from echelon.parallel.data.sharing import Storages, local_gradients, own_whole
from echelon.state.ownership import LocalParameter, OwnedSlice


@final
class AllReduce(Bucketed):
    """Ranks that sum their gradients, and each update everything."""

    def __init__(self, parameter_set: ParameterSet, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._reductions: list[Handle] = []
        super().__init__(parameter_set, bucket_bytes)

    def local_parameters(self) -> list[LocalParameter]:
        return self._whole

    def norm_share(self) -> list[Tensor]:
        # Every rank has every gradient: each takes one part of each bucket, and reads 1/N of the memory.
        gradients = self._gradient_buffers()
        uncounted = self.parameter_set.uncounted
        moved = any(p.grad is not None and p.grad is not b.views[p] for b in self._buckets for p in b.views)
        if uncounted or moved:
            gradients = [gradient.flatten() for gradient in local_gradients(self._whole, uncounted)]
        return [gradient.tensor_split(self._group.size)[self._group.rank] for gradient in gradients]

    def owned(self) -> list[OwnedSlice]:
        return own_whole(self.parameter_set)

    def storages(self) -> Storages:
        return Storages(list(self.parameter_set.parameters.values()), self._gradient_buffers())

    def _reduce(self, bucket: Bucket) -> None:
        with self._group.ledger.about("gradients"):
            self._reductions.append(self._group.all_reduce(bucket.buffer, wait=False))

    def _complete(self) -> None:
        for reduction in self._reductions:
            reduction.wait()
        self._reductions = []
