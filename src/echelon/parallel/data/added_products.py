"""Gradients of matrices inside of compiled layers that are added where they are: product and sum in one.

torch.compile records a backward pass before anybody knows whether a sum is there, and whether it may be added
to. So an operator takes the place of each product that is the gradient of a matrix, and asks when it runs:

    weight_gradient(left, right, weight)    a sum is there      sum += left · right, and no gradient
                                            the first of some   left · right in the type of the sum
                                            else                left · right

No gradient is None: autograd has nothing to add. The compiler takes the operator for the product.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

from echelon.parallel.data.buckets import gradient_dtype
from echelon.parallel.data.grad_accumulation import SMALLEST, Accumulation, add_product, use_of

_library = torch.library.Library("echelon", "FRAGMENT")
_library.define("weight_gradient(Tensor left, Tensor right, Tensor weight, bool transposed) -> Tensor")

# That of each matrix, by shapes. One whose engine is closed lets nobody add.
_accumulations: dict[torch.Size, MutableMapping[Tensor, Accumulation]] = {}

_aten = torch.ops.aten


def accumulate_compiled(accumulations: Mapping[nn.Parameter, Accumulation]) -> None:
    """Let compiled layers add to the gradients of large matrices while their accumulation is open."""
    for parameter, accumulation in accumulations.items():
        if parameter.dim() == 2 and parameter.numel() >= SMALLEST:
            _accumulations.setdefault(parameter.shape, WeakIdKeyDictionary())[parameter] = accumulation


def _parameter_of(weight: Tensor) -> Tensor | None:
    """Return the parameter that autograd has saved: where hooks keep what it saves, another tensor comes
    back, of the same memory."""
    alike = _accumulations.get(weight.shape, {})
    if weight in alike or not alike:
        return weight if alike else None
    address = weight.data_ptr()
    found = [each for each in alike if each.data_ptr() == address != 0]
    return found[0] if len(found) == 1 else None


def _weight_gradient(left: Tensor, right: Tensor, weight: Tensor, transposed: bool) -> Tensor | None:
    if transposed:
        left, right = right.T, left.T
    parameter = _parameter_of(weight)
    if parameter is not None and use_of(get_gradient_edge(parameter).node):
        accumulation = _accumulations[parameter.shape][parameter]
        if accumulation.may_add(parameter):
            assert parameter.grad is not None
            add_product(parameter.grad, left, right)
            return None
        if accumulation.begins_sum(parameter):
            return torch.mm(left, right, out_dtype=gradient_dtype(parameter))
    return left @ right


def _like_product(left: Tensor, right: Tensor, weight: Tensor, transposed: bool) -> Tensor:  # noqa: ARG001
    rows, columns = left.shape[0], right.shape[1]
    return left.new_empty((columns, rows) if transposed else (rows, columns))


_library.impl("weight_gradient", _weight_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("echelon::weight_gradient", _like_product, lib=_library)


def add_products(graph: fx.Graph) -> None:
    """Put the operator in the place of products. `graph`: of a forward and its backward pass, which returns
    a gradient for each input of the forward pass, after all else."""
    (output,) = graph.find_nodes(op="output")
    returned = list(output.args[0])
    inputs = [node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("primals_")]
    first = len(returned) - len(inputs)
    for place, weight in enumerate(inputs, first):
        product, transposed = _product(returned[place])
        if product is None or not _is_gradient(returned[place], weight):
            continue
        with graph.inserting_before(output):
            arguments = (*product.args, weight, transposed)
            gradient = graph.call_function(torch.ops.echelon.weight_gradient.default, arguments)
        gradient.meta = {
            **returned[place].meta,
            "val": weight.meta["val"].new_empty(weight.meta["val"].shape),
        }
        returned[place] = gradient
    output.args = (returned,)
    graph.eliminate_dead_code()


def _product(gradient: Any) -> tuple[fx.Node | None, bool]:
    """Return the product that a result is, if nothing else reads it, and whether it is transposed."""
    node, transposed = gradient, False
    while isinstance(node, fx.Node) and len(node.users) == 1 and node.target is _aten.permute.default:
        node, transposed = node.args[0], not transposed
    is_product = isinstance(node, fx.Node) and len(node.users) == 1 and node.target is _aten.mm.default
    return (node if is_product else None), transposed


def _is_gradient(gradient: fx.Node, weight: fx.Node) -> bool:
    one, other = gradient.meta["val"], weight.meta["val"]
    return bool(one.shape == other.shape and one.dtype == other.dtype)
