"""The arguments of a call, so that it can be repeated: kept tensors, references to what the layer before
returned, and all else as it is."""

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from echelon.errors import UserError
from echelon.memory.recompute.checkpoints import ArgumentName, Checkpoints, Kept
from echelon.nn.autograd.in_place import enter
from echelon.nn.autograd.saved_tensors import Hooks


@final
class Outputs:
    """What a layer has returned, without keeping it alive."""

    def __init__(self, output: Any) -> None:
        tensors = [(n, t) for n, t in enumerate(tree_leaves(output)) if isinstance(t, Tensor)]
        self._tensors = [(number, weakref.ref(tensor), tensor._version) for number, tensor in tensors]

    def find(self, tensor: Tensor) -> int | None:
        """Which output it is; None for another tensor, and for an output that was changed since."""
        for number, output, version in self._tensors:
            if output() is tensor and tensor._version == version:
                return number
        return None


class _Reference(NamedTuple):
    """An output of the call before, by its number."""

    output: int


class _Same(NamedTuple):
    """The same tensor as an argument before it, by its number."""

    argument: int


class _Checkpoint(NamedTuple):
    """A tensor that is kept."""

    kept: Kept
    requires_grad: bool
    is_leaf: bool

    def take(self) -> Tensor:
        # Not a leaf where the layer has seen none: it may change its input in place.
        tensor = self.kept.take().detach().requires_grad_(self.requires_grad)
        return tensor if self.is_leaf else enter(tensor)


@final
class Arguments:
    """Those of one call. `keep` is called after the first run, and `rebuild` before the second.

    `changed`: the arguments that the layer changes in place, of which copies are taken before it does; None
    where that is not known yet.
    """

    def __init__(
        self, args: Any, kwargs: Any, previous: Outputs | None, changed: frozenset[int] | None, name: str
    ) -> None:
        self._name = name
        leaves, self._spec = tree_flatten((args, kwargs))
        self._leaves: list[Any] = [_as_argument(leaf, leaves, n, previous) for n, leaf in enumerate(leaves)]
        _check_opaque(self._leaves, name)
        self._versions = {number: tensor._version for number, tensor in self._tensors()}
        self._copies = {
            number: tensor.detach().clone()
            for number, tensor in self._tensors()
            if changed is None or number in changed
        }

    def _tensors(self) -> Iterator[tuple[int, Tensor]]:
        return ((number, leaf) for number, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor))

    def storages(self, checkpoints: Checkpoints) -> set[int]:
        """Where the tensors lie that are kept as they are."""
        return {
            tensor.untyped_storage()._cdata
            for number, tensor in self._tensors()
            if tensor.layout == torch.strided
            and checkpoints.keeps_memory(tensor, ArgumentName(self._name, number))
        }

    def keep(self, checkpoints: Checkpoints, hooks: Hooks | None) -> frozenset[int]:
        """The first run is over: keep what it was called with. Returns which tensors it has changed."""
        changed = frozenset(n for n, tensor in self._tensors() if tensor._version != self._versions[n])
        for number, tensor in list(self._tensors()):
            value = self._copies.get(number, tensor) if number in changed else tensor
            kept = checkpoints.keep(value, hooks, ArgumentName(self._name, number))
            self._leaves[number] = _Checkpoint(kept, tensor.requires_grad, tensor.is_leaf)
        self._copies = {}
        return changed

    def rebuild(self, output: Any) -> tuple[Any, Any]:
        """The arguments of the second run, in which the call before has returned `output`."""
        outputs = tree_leaves(output)
        leaves: list[Any] = []
        for leaf in self._leaves:
            if isinstance(leaf, _Reference):
                leaves.append(outputs[leaf.output])
            elif isinstance(leaf, _Same):
                leaves.append(leaves[leaf.argument])
            else:
                leaves.append(leaf.take() if isinstance(leaf, _Checkpoint) else leaf)
        args, kwargs = tree_unflatten(leaves, self._spec)
        return args, kwargs


def _as_argument(leaf: Any, leaves: list[Any], number: int, previous: Outputs | None) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    output = None if previous is None else previous.find(leaf)
    if output is not None:
        return _Reference(output)
    first = next(n for n, other in enumerate(leaves) if other is leaf)
    return leaf if first == number else _Same(first)


def _check_opaque(leaves: list[Any], name: str) -> None:
    """Objects with tensors inside that torch cannot see would hold on to the graph, and be changed twice."""
    for leaf in leaves:
        if isinstance(leaf, Tensor | nn.Module | type) or not hasattr(leaf, "__dict__"):
            continue
        inside = tree_leaves(list(vars(leaf).values()))
        if any(isinstance(each, Tensor) and each.requires_grad for each in inside):
            raise UserError(
                f"recompute: {name} takes a {type(leaf).__name__} that holds tensors with gradients, which "
                "cannot be kept for a second run; pass the tensors themselves, in tuples or dicts, or "
                "register the class with torch.utils._pytree.register_pytree_node"
            )
