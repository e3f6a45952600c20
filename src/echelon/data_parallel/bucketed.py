"""What strategies share whose replicas all hold whole gradients, in buckets: when each bucket is complete.

Where a complete bucket goes, and who updates, is theirs to say.
"""

from abc import abstractmethod

from torch import nn

from echelon.collectives import Group
from echelon.data_parallel.adding import add_in_place
from echelon.data_parallel.buckets import Bucket, fill_buckets
from echelon.data_parallel.buffers import Buffers
from echelon.data_parallel.reducer import Reducer
from echelon.data_parallel.sync import Sync, hold_whole

# A bucket should be large enough that its latency is small, and there should be several to overlap.
BUCKET_BYTES = 25 * 2**20
_FEWEST_BUCKETS = 4


class Bucketed(Sync):
    """Gradients in buckets, which after the first step are filled anew in the order in which they come."""

    lockstep = False

    def __init__(self, module: nn.Module, group: Group, bucket_bytes: int) -> None:
        self._module, self._group = module, group
        self._trained = hold_whole(module)
        total = sum(p.numel() * p.element_size() for p in self.parameters())
        self._bucket_bytes = min(bucket_bytes, max(2**20, total // _FEWEST_BUCKETS))
        self._reducer = Reducer(self.parameters(), self._land, self._complete_bucket)
        self._buckets: list[Bucket] = []
        self._fill(list(reversed(self.parameters())))
        self._observed = False
        self._start_equal()
        self._buffers = Buffers(module, group)

    @abstractmethod
    def _start_equal(self) -> None:
        """Bring replica 0's weights to all."""

    @abstractmethod
    def _reduce(self, bucket: Bucket) -> None:
        """The bucket is complete: begin to sum it over replicas."""

    @abstractmethod
    def _complete(self) -> None:
        """Return when all that was begun is done."""

    def parameters(self) -> list[nn.Parameter]:
        return [held.parameter for held in self._trained]

    def start_step(self) -> None:
        self._complete()  # what a step that failed half-way has left
        self._reducer.start_step()
        for bucket in self._buckets:
            bucket.open()

    def start_backward(self, *, last: bool) -> None:
        self._reducer.start_backward(reducing=last)

    def finish_backward(self) -> None:
        self._reducer.flush()

    def finish_gradients(self) -> None:
        if not self._reducer.all_reduced:  # a replica without samples has had no backward pass
            self._reducer.start_backward(reducing=True)
            self._reducer.flush()
        self._complete()
        used = self._reducer.used_anywhere(self._group)
        self._reducer.finish_step()
        for held in self.held():
            if held.parameter not in used:
                held.parameter.grad = None  # as on one device: the optimizer leaves it alone

    def finish_step(self) -> None:
        self._buffers.share()
        if not self._observed and self._trained:
            self._observed = True
            self._fill(self._reducer.agreed_order(self._group))

    def add_in_place(self) -> None:
        add_in_place(self._module, self._reducer.adding)

    def _land(self, parameter: nn.Parameter) -> None:
        self._bucket_of[parameter].land(parameter)

    def _complete_bucket(self, index: int) -> None:
        bucket = self._buckets[index]
        bucket.close()
        self._reduce(bucket)

    def _fill(self, order: list[nn.Parameter]) -> None:
        for parameter in order:
            parameter.grad = None  # lets go of the buckets before
        self._buckets = []
        self._buckets = fill_buckets(order, self._bucket_bytes)
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.views}
        self._reducer.regroup([list(bucket.views) for bucket in self._buckets])
