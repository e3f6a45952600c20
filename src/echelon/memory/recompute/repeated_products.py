"""Products that compiled layers compute again under recompute=selective: marks for torch's compiler."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from echelon.memory.recompute.selective_operations import MOST_PASSES, bytes_per_flop

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)
# What may lie between a product and a sum: views, and a dropout that drops nothing.
_PASSED = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.clone.default)


def mark_products(graph: fx.Graph) -> None:
    """Mark each short product of a forward pass that is only added to something, as of attention and the
    residual stream. `graph`: of a forward and its backward pass."""
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        if (node.op == "placeholder" and "tangents" in node.name) or backward & set(node.all_input_nodes):
            backward.add(node)
        elif node.target in _PRODUCTS and _is_short(node) and _is_only_added(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _is_short(product: fx.Node) -> bool:
    """Return whether it takes no more passes over its output than is cheap."""
    left: Any = product.args[-2]
    output: Tensor = product.meta["val"]
    length = left.meta["val"].shape[-1]
    return bool(2.0 * length * bytes_per_flop(output) <= MOST_PASSES * output.element_size())


def _is_only_added(product: fx.Node) -> bool:
    users: Iterable[fx.Node] = product.users
    while len(users := list(users)) == 1 and users[0].target in _PASSED:
        users = users[0].users
    return bool(users) and all(user.target is _aten.add.Tensor for user in users)
