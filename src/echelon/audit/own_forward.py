"""Whether a model's layers, called one after the other, are its forward.

The model's own forward runs once, of a sample or two, on one rank that has whole weights for that long. What
ranks compare is small: for each tensor of the output its norm and two sums that tell places apart, and the
loss.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from echelon.audit.samples import rounding

_AT_ONCE = 1 << 22  # elements
_TURNS = (1.0, 0.618)  # radians from one element to the next, in the two sums


class Measure(NamedTuple):
    """One tensor of an output."""

    shape: list[int]
    tolerance: float  # relative to the norm
    norm: float
    sums: list[float]


def measure_output(output: Any) -> dict[str, Measure]:
    """The tensors of an output, by their place in it; of transformers' outputs the logits alone."""
    logits = getattr(output, "logits", None)
    leaves, _ = tree_flatten_with_path(logits if isinstance(logits, Tensor) else output)
    return {keystr(path): measure(leaf) for path, leaf in leaves if isinstance(leaf, Tensor)}


@torch.no_grad()
def measure(tensor: Tensor) -> Measure:
    dense = tensor.detach()
    flat = (torch.view_as_real(dense) if dense.is_complex() else dense).flatten()
    sums = torch.zeros(1 + len(_TURNS), dtype=torch.float64, device=flat.device)
    for part in flat.split(_AT_ONCE):
        numbers = part.double().nan_to_num(0.0, 0.0, 0.0)
        places = torch.arange(len(part), dtype=torch.float64, device=part.device)
        sums += torch.stack([numbers @ numbers, *(numbers @ (places * turn).cos() for turn in _TURNS)])
    square, *others = sums.tolist()
    return Measure(list(tensor.shape), rounding(tensor.dtype), math.sqrt(square), others)


def find_difference(by_layers: Mapping[str, Measure], own: Mapping[str, Measure]) -> str:
    """What differs between two outputs, in words; empty if nothing does."""
    for place, one in by_layers.items():
        other = own.get(place) or _only_like(one, own)
        if other is None:
            continue  # the loss tells
        where = f"output{place}"
        if list(one.shape) != list(other.shape):
            return f"{where} has the shape {list(one.shape)} by layers and {list(other.shape)} by its forward"
        size = max(one.norm, other.norm)
        pairs = zip([one.norm, *one.sums], [other.norm, *other.sums], strict=True)
        if any(abs(a - b) > max(one.tolerance, other.tolerance) * size for a, b in pairs):
            return (
                f"{where} has a norm of {one.norm:.6g} by layers and {other.norm:.6g} by its forward, or its "
                "values stand at other places"
            )
    return ""


def _only_like(one: Measure, own: Mapping[str, Measure]) -> Measure | None:
    """The only tensor of this shape, where outputs have different structures."""
    alike = [other for other in own.values() if list(other.shape) == list(one.shape)]
    return alike[0] if len(alike) == 1 else None


def message(difference: str, plan: str) -> str:
    return (
        f"plan '{plan}' runs the model layer by layer, and its layers are not its forward: for the first "
        f"sample, {difference}. Likely layers() leaves out something that forward does (a scale, a norm, "
        "dropout), or calls layers in another order; put it into a layer, and let forward run "
        "`for layer in self.layers(): x = layer(x)`; audit='off' if it is meant"
    )


@contextmanager
def with_tensors(skeleton: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Give a skeleton whole weights and buffers, by their first names, for as long as this is open."""
    first_names: dict[int, str] = {}
    slots = [
        (module, attribute, parameter, first_names.setdefault(id(parameter), _name(path, attribute)))
        for path, module in skeleton.named_modules()
        for attribute, parameter in list(module._parameters.items())
        if parameter is not None
    ]
    given = {name: nn.Parameter(tensors[name], requires_grad=False) for *_, name in slots}
    with torch.no_grad():
        for name, buffer in skeleton.named_buffers():
            if name in tensors:
                buffer.copy_(tensors[name])
    try:
        for module, attribute, _, name in slots:
            setattr(module, attribute, given[name])  # also where a module has lists of its weights
        yield
    finally:
        for module, attribute, parameter, _ in slots:
            setattr(module, attribute, parameter)


def _name(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else attribute
