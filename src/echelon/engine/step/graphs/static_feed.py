"""The microbatches of a step in memory that stays: a recording reads them from there, in every step.

    values              tensors                        numbers, texts
    of a recording      copied into the same memory    constants: another one needs another recording

What is copied is all that passes may read of a step: inputs, targets, the counts that losses are divided by,
with the loss scale; and the number of the step, which random numbers are drawn by.
"""

from collections.abc import Mapping
from functools import partial
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
        self.leaves: list[Any] = []
        self.specs: list[TreeSpec | None] = []  # None: a tensor by itself, as most are
        for each in feed.values():
            self._take_apart(each.inputs)
            self._take_apart(each.targets.values)
        first = next(iter(feed.values()), None)
        if first is not None:
            self.leaves += [first.loss_scale, *first.normaliser.numbers()]
        self.constants = tuple((number, *each.targets[1:], *each[2:4]) for number, each in feed.items())
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.foreign = next((type(leaf).__name__ for leaf in self.leaves if not _is_known(leaf)), None)

    def _take_apart(self, value: Any) -> None:
        if type(value) is Tensor:
            self.leaves.append(value)
            self.specs.append(None)
        else:
            leaves, spec = tree_flatten(value)
            self.leaves += leaves
            self.specs.append(spec)

    def key(self) -> Key:
        """Return what one recording serves: forms of tensors, and all other values."""
        specs = (None if spec is None else str(spec) for spec in self.specs)
        return (self.constants, *specs, *map(_key_of, self.leaves))


@final
class StaticFeed:
    """Copies of one step's tensors and its number, and microbatches made of them. `is_watched`: for passes
    that are not recorded yet, but watched for draws."""

    def __init__(
        self,
        live: LiveFeed,
        feed: Mapping[int, Microbatch],
        maker: Feed,
        step: int,
        device: torch.device,
        *,
        is_watched: bool = False,
    ) -> None:
        self._step = torch.full((), step, dtype=torch.int64, device=device)
        self._tensors = [torch.empty_like(tensor).copy_(tensor) for tensor in live.tensors]
        tensors = iter(self._tensors)
        self._leaves = iter([next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in live.leaves])
        specs = iter(live.specs)
        values = [(self._rebuild(next(specs)), self._rebuild(next(specs))) for _ in feed]
        self.microbatches = dict[int, Microbatch]()
        samples = sum(each.targets.num_samples for each in feed.values())
        scope = maker.recorded_scope(self._step, samples, step if is_watched else None)
        loss_scale, numbers, normaliser = next(self._leaves, 1.0), list(self._leaves), None
        for (number, each), (inputs, targets) in zip(feed.items(), values, strict=True):
            normaliser = normaliser or each.normaliser.with_numbers(numbers, is_recorded=not is_watched)
            copied = each._replace(inputs=inputs, targets=each.targets._replace(values=targets))
            self.microbatches[number] = maker.repeated(copied, partial(scope, number), normaliser, loss_scale)

    def load(self, live: LiveFeed, step: int) -> None:
        """Take the values of another step with the same key."""
        self._step.fill_(step)
        if self._tensors:
            torch._foreach_copy_(self._tensors, live.tensors)

    def _rebuild(self, spec: TreeSpec | None) -> Any:
        if spec is None:
            return next(self._leaves)
        return tree_unflatten([next(self._leaves) for _ in range(spec.num_leaves)], spec)


def _is_known(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return type(leaf) is Tensor and leaf.layout == torch.strided and not leaf.requires_grad
    return type(leaf) in _PLAIN


def _key_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device
    return type(leaf), leaf
