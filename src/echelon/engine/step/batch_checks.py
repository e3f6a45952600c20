"""What a batch may hold: tensors with one row per sample, and plain values that are the same for all."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from echelon.errors import raise_errors
from echelon.nn.batch import Batch, Inputs

_PLAIN_LEAVES = (str, int, float, bool, type(None))


def check_batch(batch: Batch) -> None:
    """Refuse (inputs, targets) that hold what cannot be cut into samples."""
    leaves = tree_leaves(batch)
    if all(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves):
        errors = []
    else:
        errors = [_leaf_error(place, leaf) for place, leaf in _places(batch) if not _is_leaf(leaf)]
    raise_errors("the batch", errors or _size_errors(batch, leaves))


def _is_leaf(leaf: object) -> bool:
    return leaf.dim() > 0 if isinstance(leaf, Tensor) else isinstance(leaf, _PLAIN_LEAVES)


def _leaf_error(place: str, leaf: object) -> str:
    kind = type(leaf).__name__
    if isinstance(leaf, Tensor):
        return (
            f"{place} is a tensor without dims: its first dim must count the samples; give it one for each, "
            "or give a number"
        )
    if isinstance(leaf, Mapping):
        return f"{place} is a {kind}, which torch does not look into: give a dict"
    return (
        f"{place} is a {kind}: must be a tensor, str, int, float, bool or None, or a dict, list or tuple of "
        "them; convert it, like torch.as_tensor(values)"
    )


def _size_errors(batch: Batch, leaves: list[Any]) -> list[str]:
    """Where tensors, or lists of plain values, have another number of samples than the rest, or as many."""
    sizes = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
    if len(sizes) == 1:
        samples = sizes.pop()
        has_values = samples > 1 and any(not isinstance(leaf, Tensor | None) for leaf in leaves)
        return [_list_error(place, samples) for place in _lists(batch, samples)] if has_values else []
    tensors = [(place, leaf) for place, leaf in _places(batch) if isinstance(leaf, Tensor)]
    rows = ", ".join(f"{place} {list(leaf.shape)}" for place, leaf in tensors)
    return [
        "every tensor of a batch must have the same first dim, the samples, and the batch has "
        f"{rows or 'no tensor at all'}; expand what is the same for all samples, like "
        "positions.expand(samples, -1)"
    ]


def _list_error(place: str, samples: int) -> str:
    return (
        f"{place} is a list of {samples} values, as many as the batch has samples, and only tensors are cut "
        "into samples; make it a tensor, like torch.tensor(values), or keep it in the model"
    )


def _places(batch: Batch) -> Iterator[tuple[str, Any]]:
    """Every leaf and its place, like inputs['mask']."""
    for name, part in zip(("inputs", "targets"), batch, strict=True):
        for path, leaf in tree_flatten_with_path(part)[0]:
            yield name + keystr(path), leaf


def _lists(batch: Batch, length: int) -> Iterator[str]:
    """The places of lists of so many plain values."""
    pending: list[tuple[str, Any]] = list(zip(("inputs", "targets"), batch, strict=True))
    while pending:
        place, value = pending.pop()
        items = _items(value)
        is_list = type(value) in (list, tuple) and len(value) == length
        if is_list and all(isinstance(item, str | int | float) for _, item in items):
            yield place
        pending += [(f"{place}[{key!r}]", item) for key, item in items]


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Inputs):
        return [*enumerate(value.args), *value.kwargs.items()]
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, tuple | list) else []
