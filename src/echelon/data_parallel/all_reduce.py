"""Data parallelism by all-reduce (DDP): replicas hold everything and sum their gradients, bucket by bucket.

A bucket's all-reduce starts as soon as the last microbatch's backward pass has completed it, while the
backward pass goes on. Earlier microbatches only accumulate: one synchronisation a step. After the first step
the buckets are filled anew, in the order in which gradients really come.
"""

from typing import final

from torch import Tensor, nn

from echelon.collectives import Group, Handle
from echelon.data_parallel.buckets import Bucket, fill_buckets
from echelon.data_parallel.buffers import Buffers, broadcast
from echelon.data_parallel.reducer import Reducer
from echelon.data_parallel.sync import Storages, Sync, hold_whole, own_module
from echelon.ownership import Held, Owned, Slice, whole_slice

# A bucket should be large enough that its latency is small, and there should be several to overlap.
BUCKET_BYTES = 25 * 2**20
_FEWEST_BUCKETS = 4


@final
class AllReduce(Sync):
    """Replicas along `group` that sum gradients; replica 0's weights and buffers are the start."""

    sharded = False
    lockstep = False

    def __init__(self, module: nn.Module, group: Group, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._module, self._group = module, group
        self._held = hold_whole(module)
        total = sum(p.numel() * p.element_size() for p in self.parameters())
        self._bucket_bytes = min(bucket_bytes, max(2**20, total // _FEWEST_BUCKETS))
        self._reductions: list[Handle] = []
        self._reducer = Reducer(self.parameters(), self._reduce)
        self._buckets: list[Bucket] = []
        self._fill(list(reversed(self.parameters())))
        self._observed = False
        with group.ledger.about("parameters"):
            for parameter in module.parameters():
                broadcast(parameter, group)
        self._buffers = Buffers(module, group)

    def parameters(self) -> list[nn.Parameter]:
        return [held.parameter for held in self._held]

    def held(self) -> list[Held]:
        return self._held

    def start_step(self) -> None:
        self._wait()  # for what a step that failed half-way has left
        self._reducer.start_step()
        for bucket in self._buckets:
            bucket.clear()

    def start_backward(self, *, last: bool) -> None:
        self._reducer.start_backward(reducing=last)

    def finish_backward(self) -> None:
        self._reducer.flush()

    def finish_gradients(self) -> None:
        if not self._reducer.all_reduced:  # a replica without samples has had no backward pass
            self._reducer.start_backward(reducing=True)
            self._reducer.flush()
        self._wait()
        used = self._reducer.used_anywhere(self._group)
        self._reducer.finish_step()
        for held in self._held:
            if held.parameter not in used:
                held.parameter.grad = None  # as on one device: the optimizer leaves it alone

    def norm_share(self) -> list[Tensor]:
        # Every rank has every gradient: each takes one part of each bucket, and reads 1/N of the memory.
        return [bucket.buffer.tensor_split(self._group.size)[self._group.rank] for bucket in self._buckets]

    def finish_step(self) -> None:
        self._buffers.share()
        if not self._observed and self._held:
            self._observed = True
            self._fill(self._reducer.agreed_order(self._group))

    def owned(self) -> list[Owned]:
        return own_module(self._module, replicated=("data",))

    def slices(self, held: Held) -> list[Slice]:
        return [whole_slice(held.name, held.parameter, replicated=("data",))]

    def storages(self) -> Storages:
        return Storages(list(self._module.parameters()), [bucket.buffer for bucket in self._buckets])

    def _fill(self, order: list[nn.Parameter]) -> None:
        self._buckets = fill_buckets(order, self._bucket_bytes)
        self._reducer.regroup([list(bucket.views) for bucket in self._buckets])

    def _reduce(self, index: int) -> None:
        with self._group.ledger.about("gradients"):
            self._reductions.append(self._group.all_reduce(self._buckets[index].buffer, wait=False))

    def _wait(self) -> None:
        for reduction in self._reductions:
            reduction.wait()
        self._reductions = []
