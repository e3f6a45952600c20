"""A worker's gradients between its backward passes and its push: they only add up, nothing is sent before."""

from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from echelon.parallel.data import LocalSum, ParameterSet, Storages
from echelon.parallel.data.buckets import Bucket, move_in, weight_dtype
from echelon.parallel.data.grad_accumulation import hook_gradient
from echelon.parallel.data.sharing import whole_parameters
from echelon.state.ownership import LocalParameter, OwnedSlice
from echelon.update.async_training.host import flat_buckets


@final
class WorkerGradients(LocalSum):
    """The weights as this worker pulled them, and the gradients that it will push. The server updates."""

    def __init__(self, parameter_set: ParameterSet) -> None:
        super().__init__(parameter_set)
        self._trained = [parameter for _, parameter in parameter_set.trained]
        self._weights = flat_buckets(self._trained, dtype_of=weight_dtype)
        self.buckets = flat_buckets(self._trained)
        for bucket in self._weights:
            move_in(bucket)
        self._used: set[nn.Parameter] = set()
        # Not of `self`: a parameter may outlive this.
        arrived = partial(_arrived, self._used, self.buckets)
        self._hooks = [hook_gradient(parameter, arrived) for parameter in self._trained]

    @property
    def weights(self) -> list[Tensor]:
        """The memory that a pull writes to."""
        return [bucket.buffer for bucket in self._weights]

    def local_parameters(self) -> list[LocalParameter]:
        return []

    def summed_parameters(self) -> list[LocalParameter]:
        return whole_parameters(self.parameter_set)

    def start_step(self) -> None:
        super().start_step()
        self._used.clear()
        for bucket in self.buckets:
            bucket.open()

    def reduce(self) -> None:
        """The gradients are complete; the server adds them to those of others."""
        for bucket in self.buckets:
            bucket.close()

    def used_flags(self) -> Tensor:
        """Which of the trained parameters have got a gradient in this step."""
        return torch.tensor([p in self._used for p in self._trained], dtype=torch.uint8)

    def norm_share(self) -> list[Tensor]:
        return []

    def owned(self) -> list[OwnedSlice]:
        return []

    def storages(self) -> Storages:
        gradients = [bucket.buffer for bucket in self.buckets]
        return Storages(list(self.parameter_set.parameters.values()), gradients)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        super().close()


def _arrived(used: set[nn.Parameter], buckets: list[Bucket], parameter: Tensor) -> None:
    assert isinstance(parameter, nn.Parameter)
    if parameter.grad is None:
        return  # torch also calls this when a function has no gradient for it
    used.add(parameter)
    for bucket in buckets:
        if parameter in bucket.views:
            bucket.accumulate(parameter)
