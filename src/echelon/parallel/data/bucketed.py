"""What strategies share whose ranks all hold whole gradients, in buckets: when each bucket is complete.

Where a complete bucket goes, and who updates, is for each strategy to say.
"""

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from echelon.parallel.data.buckets import Bucket, fill_buckets
from echelon.parallel.data.grad_dtype import gradient_dtype
from echelon.parallel.data.parameter_set import ParameterSet
from echelon.parallel.data.reducer import Reducer
from echelon.parallel.data.sharing import Sharing, whole_parameters

# A bucket should be large enough that its latency is small, and there should be several to overlap.
BUCKET_BYTES = 25 * 2**20
_FEWEST_BUCKETS = 4


class Bucketed(Sharing):
    """Gradients in buckets, which after the first step are filled again in the order in which they come."""

    def __init__(self, parameter_set: ParameterSet, bucket_bytes: int) -> None:
        super().__init__(parameter_set)
        self._group = parameter_set.group
        self._whole = whole_parameters(parameter_set)
        trained = [parameter for _, parameter in parameter_set.trained]
        total = sum(p.numel() * gradient_dtype(p).itemsize for p in trained)
        self._bucket_bytes = min(bucket_bytes, max(2**20, total // _FEWEST_BUCKETS))
        self.reducer: Reducer = Reducer(trained, self._accumulate, self._complete_bucket)
        self.accumulation = self.reducer.accumulation
        self._buckets: list[Bucket] = []
        self._fill(list(reversed(trained)))
        self._observed = False

    @abstractmethod
    def _reduce(self, bucket: Bucket) -> None:
        """The bucket is complete: begin to sum it over ranks."""

    @abstractmethod
    def _complete(self) -> None:
        """Return when all sums that were begun are done."""

    def start_step(self) -> None:
        super().start_step()
        self._complete()  # what a step that failed half-way has left
        self.reducer.start_step()
        for bucket in self._buckets:
            bucket.open()

    def start_backward(self, *, last: bool) -> None:
        self.reducer.start_backward(reducing=last)

    def finish_backward(self) -> None:
        self.reducer.flush()

    def reduce(self) -> None:
        self.start_reductions()
        self._complete()
        used = self.reducer.used_anywhere(self._group)
        self.reducer.finish_step()
        for local in self.local_parameters():
            if local.parameter not in used:
                local.parameter.grad = None  # as on one device: the optimizer leaves it alone

    def publish(self) -> None:
        if not self._observed and self._whole:
            self._observed = True
            self._fill(self.reducer.agreed_order(self._group))

    def learned_order(self) -> list[str]:
        """The parameters, in the order of buckets, once it is that in which gradients come."""
        names = {parameter: name for name, parameter in self.parameter_set.trained}
        return [names[p] for bucket in self._buckets for p in bucket.views] if self._observed else []

    def restore_order(self, names: Sequence[str]) -> None:
        """Begin with an order that was learned before, if it is one of these parameters."""
        trained = dict(self.parameter_set.trained)
        if trained.keys() == set(names) and names:
            self._observed = True
            self._fill([trained[name] for name in names])

    def close(self) -> None:
        self.reducer.close()
        super().close()

    def _gradient_buffers(self) -> list[Tensor]:
        return [bucket.buffer for bucket in self._buckets]

    def _accumulate(self, parameter: nn.Parameter) -> None:
        self._bucket_of[parameter].accumulate(parameter)

    def _complete_bucket(self, index: int) -> None:
        bucket = self._buckets[index]
        bucket.close()
        self._reduce(bucket)

    def _fill(self, order: list[nn.Parameter]) -> None:
        for parameter in order:
            parameter.grad = None  # lets go of the earlier buckets
        self._buckets = []
        self._buckets = fill_buckets(order, self._bucket_bytes)
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.views}
        self.reducer.regroup([list(bucket.views) for bucket in self._buckets])
