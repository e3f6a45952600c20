"""The microbatches of a step in memory that stays: a recording reads them from there, in every step.

    values              tensors                        numbers, texts
    of a recording      copied into the same memory    constants: another one needs another recording

What is copied is all that passes may read of a step: inputs, targets, and the counts that losses are divided
by, with the loss scale.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from echelon.engine.step.feed import Feed
from echelon.engine.step.runtime.flight import Microbatch

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)

Key = tuple[Any, ...]


@final
class LiveFeed:
    """The values of one step, taken apart. `foreign`: the type of a value that no recording can hold."""

    def __init__(self, feed: Mapping[int, Microbatch]) -> None:
        values = [
            (number, each.inputs, each.targets, each.weight, each.form, each.loss_scale)
            for number, each in feed.items()
        ]
        normaliser = next((each.normaliser for each in feed.values()), None)
        numbers = None if normaliser is None else normaliser.numbers()
        leaves, self.spec = tree_flatten((values, numbers))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.leaves = leaves
        self.foreign = next((type(leaf).__name__ for leaf in leaves if not _is_known(leaf)), None)

    def key(self) -> Key:
        """Return what one recording serves: forms of tensors, and all other values."""
        return (str(self.spec), *map(_key_of, self.leaves))


@final
class StaticFeed:
    """Copies of one step's tensors, and microbatches made of them."""

    def __init__(self, live: LiveFeed, feed: Mapping[int, Microbatch], maker: Feed) -> None:
        self._tensors = [torch.empty_like(tensor).copy_(tensor) for tensor in live.tensors]
        self.microbatches = self._rebuild(live.leaves, live.spec, feed, maker)

    def load(self, live: LiveFeed) -> None:
        """Take the values of another step with the same key."""
        if self._tensors:
            torch._foreach_copy_(self._tensors, live.tensors)

    def _rebuild(
        self, leaves: Sequence[Any], spec: TreeSpec, feed: Mapping[int, Microbatch], maker: Feed
    ) -> dict[int, Microbatch]:
        tensors = iter(self._tensors)
        static = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        values, numbers = tree_unflatten(static, spec)
        first = next(iter(feed.values()), None)
        normaliser = None if first is None else first.normaliser
        if normaliser is not None:
            normaliser = normaliser.with_numbers(numbers)
        return {
            number: maker.repeated(Microbatch(inputs, targets, weight, form), normaliser, loss_scale)
            for number, inputs, targets, weight, form, loss_scale in values
        }


def _is_known(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return type(leaf) is Tensor and leaf.layout == torch.strided and not leaf.requires_grad
    return type(leaf) in _PLAIN


def _key_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device
    return type(leaf), leaf
