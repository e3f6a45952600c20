"""Whether a loss weighs classes: made-up samples of some of them together, against each of these by itself.

    sample 0   classes 0 1 0 1       few at a time, so that the weight of one is much of all
    sample 1   classes 2 3 2 3
    sample 2   the usual one alone

All have the same output, but the last, whose is smaller. A batch shows a few classes, so that the weight of
another one would appear much later.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.audit.loss_parts import Batch, Loss, LossParts, LossRefusedError, Sums
from echelon.audit.samples import map_tensors

_BYTES = 2**20  # of the output of one sample in float64; larger ones are not asked
_BYTES_IN_ALL = 2**28  # of all that are asked
_CLASSES = 4096  # that are asked
_AT_ONCE = 8  # classes
_SMALLER = 0.1


def on_host(loss: Loss) -> Loss:
    """The loss for tensors on the host: a copy of a module that has its own on a device."""
    if not isinstance(loss, nn.Module):
        return loss
    tensors = [value for module in loss.modules() for value in _tensors(list(vars(module).values()))]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return loss
    try:
        copied = copy.deepcopy(loss).cpu()
    except Exception:  # of whatever it keeps; then it refuses tensors on the host, which is told
        return loss
    for module in copied.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                setattr(module, name, value.cpu())
    return copied


def num_classes(loss: LossParts, batch: Batch) -> int:
    """How many classes the loss knows, by the sizes of the output: it takes the last, and refuses the next.
    0 if it refuses none. `batch` must be on the host: a device ends the process where a target is no class.
    """
    sizes = {size for leaf in _floats(batch.output) for size in leaf.shape}
    for size in sorted(sizes, reverse=True):
        if size > 1 and _takes(loss, batch, size - 1) and not _takes(loss, batch, size):
            return size
    return 0


def _takes(loss: LossParts, batch: Batch, value: int) -> bool:
    output, targets, _ = batch.part(0, 1)
    targets = map_tensors(lambda leaf: torch.full_like(leaf, value) if _is_class(leaf) else leaf, targets)
    for wide in (True, False):
        try:
            loss.sums((output, targets, 1), wide=wide)
        except LossRefusedError:
            continue
        return True
    return False


def is_small(batch: Batch) -> bool:
    """Whether its samples are small enough to make up many of them."""
    return _bytes_per_sample(batch) <= _BYTES


def difference_of_classes(loss: LossParts, batch: Batch, classes: Sequence[int], usual: int) -> Sums | None:
    """The loss of some classes, together and sample by sample, if they differ by more than rounding."""
    output, targets, _ = batch.part(0, 1)
    per_sample = min((leaf.numel() for leaf in _tensors(targets) if _is_class(leaf)), default=0)
    if not per_sample or not classes:
        return None
    most_rows = max(1, _BYTES_IN_ALL // max(1, _bytes_per_sample(batch)))
    asked = list(classes[: min(_CLASSES, most_rows * per_sample)])
    together = min(per_sample, max(_AT_ONCE, -(-len(asked) // most_rows)))
    rows = [asked[begin : begin + together] for begin in range(0, len(asked), together)]
    step = max(1, _AT_ONCE // together)
    sample = batch._replace(output=map_tensors(_varied, output), targets=targets)
    for begin in range(0, len(rows), step):
        made_up = _make_up(sample, [*rows[begin : begin + step], [usual]])
        parts = [made_up.part(number, number + 1) for number in range(made_up.samples)]
        sums = loss.compare(made_up.part(0, made_up.samples), parts)
        if sums is not None:
            return sums
    return None


def _make_up(sample: Batch, rows: Sequence[Sequence[int]]) -> Batch:
    output = _repeat(sample.output, sample.dims, len(rows))
    targets = map_tensors(lambda leaf: _fill(leaf, rows), sample.targets)
    return Batch(output, targets, sample.dims, sample.target_dims, len(rows))


def _repeat(output: Any, dims: Sequence[int | None], count: int) -> Any:
    remaining = iter(dims)

    def repeat(leaf: Tensor) -> Tensor:
        dim = next(remaining)
        assert dim is not None
        last = leaf * _SMALLER if leaf.is_floating_point() else leaf
        return torch.cat([*[leaf] * (count - 1), last], dim)

    return map_tensors(repeat, output)


def _fill(leaf: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
    """As many samples as rows, each with the targets of its row, again and again."""
    if not _is_class(leaf):
        return torch.cat([leaf] * len(rows))
    places = torch.arange(leaf.numel())
    filled = torch.stack([torch.tensor(row)[places % len(row)] for row in rows])
    return filled.view(len(rows) * len(leaf), *leaf.shape[1:])


def _varied(leaf: Tensor) -> Tensor:
    """A layer that starts at zero gives all classes the same loss, which hides their weights."""
    is_constant = leaf.is_floating_point() and leaf.numel() > 1 and bool((leaf == leaf.flatten()[0]).all())
    if not is_constant:
        return leaf
    return leaf + torch.linspace(0, 0.5, leaf.numel(), dtype=leaf.dtype).view(leaf.shape)


def _bytes_per_sample(batch: Batch) -> int:
    return 8 * sum(leaf.numel() for leaf in _floats(batch.output)) // batch.samples


def _is_class(leaf: Tensor) -> bool:
    return leaf.dtype == torch.int64


def _floats(structure: Any) -> list[Tensor]:
    return [leaf for leaf in _tensors(structure) if leaf.is_floating_point()]


def _tensors(structure: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(structure) if isinstance(leaf, Tensor)]
