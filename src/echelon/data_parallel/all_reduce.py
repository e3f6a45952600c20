"""Data parallelism by all-reduce (DDP): replicas hold everything and sum their gradients, bucket by bucket.

A bucket's all-reduce starts as soon as the last microbatch's backward pass has completed it, while the
backward pass goes on. Earlier microbatches only accumulate: one synchronisation a step.
"""

from itertools import takewhile
from typing import final

import torch
from torch import Tensor, nn

from echelon.collectives import Group, Handle
from echelon.data_parallel.buckets import Bucket, fill_buckets
from echelon.data_parallel.sync import Sync
from echelon.ownership import Owned, own_whole

BUCKET_BYTES = 25 * 2**20


@final
class AllReduce(Sync):
    """Replicas along `group` that sum gradients; replica 0's weights and buffers are the start."""

    def __init__(self, module: nn.Module, group: Group, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._module, self._group = module, group
        self._named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._buckets = fill_buckets([p for _, p in self._named], bucket_bytes)
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.views}
        self._used: set[nn.Parameter] = set()
        self._missing: dict[Bucket, set[nn.Parameter]] = {}
        self._reductions: list[Handle] = []
        self._last = False
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._arrived)
        self._start_equal()

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return self._named

    def start_step(self) -> None:
        self._wait()  # for what a step that failed half-way has left
        self._last = False
        self._used = set()
        self._missing = {bucket: set(bucket.views) for bucket in self._buckets}
        for bucket in self._buckets:
            bucket.clear()

    def start_backward(self, *, last: bool) -> None:
        self._last = last

    def finish_gradients(self) -> None:
        # Parameters that this replica's last microbatch did not use leave their buckets open.
        self._reduce_up_to(len(self._buckets))
        used = self._used_anywhere()
        self._wait()
        for (_, parameter), was_used in zip(self._named, used.tolist(), strict=True):
            if not was_used:
                parameter.grad = None  # as on one device: the optimizer leaves it alone

    def finish_step(self) -> None:
        pass

    def owned(self) -> list[Owned]:
        return own_whole(self._module.named_parameters(), replicated=("data",))

    def _start_equal(self) -> None:
        with self._group.ledger.about("parameters"):
            for tensor in [*self._module.parameters(), *self._module.buffers()]:
                packed = tensor.data.contiguous()
                self._group.broadcast(packed, source=0)
                tensor.data.copy_(packed)

    def _arrived(self, parameter: nn.Parameter) -> None:
        """The backward pass has added to this parameter's gradient."""
        self._used.add(parameter)
        if self._last:
            self._missing[self._bucket_of[parameter]].discard(parameter)
            complete = takewhile(lambda bucket: not self._missing[bucket], self._buckets)
            self._reduce_up_to(sum(1 for _ in complete))

    def _reduce_up_to(self, count: int) -> None:
        """Start the first `count` buckets: always in this order, so that all replicas agree on it."""
        with self._group.ledger.about("gradients"):
            for bucket in self._buckets[len(self._reductions) : count]:
                self._reductions.append(self._group.all_reduce(bucket.buffer, wait=False))

    def _wait(self) -> None:
        for reduction in self._reductions:
            reduction.wait()
        self._reductions = []

    def _used_anywhere(self) -> Tensor:
        """One flag a parameter: whether any replica used it in this step."""
        flags = torch.tensor([p in self._used for _, p in self._named], dtype=torch.uint8)
        flags = flags.to(self._buckets[0].buffer.device) if self._buckets else flags
        with self._group.ledger.about("used parameters"):
            self._group.all_reduce(flags, "max")
        return flags
