"""A backward pass in two: gradients for the inputs first, those for the weights later.

The graph of a stage, from its outputs down:

    outputs ─ node ─ node ─ … ─ inputs        [1] the spine: what leads to the inputs
                │      │
              weight  weight                  [2] what hangs on it: leads to weights, never to an input

The first pass walks the spine alone and keeps the gradients that come by at each node on which weights hang.
The second takes each of those nodes once more, towards its weights only.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class _Kept(NamedTuple):
    """A node of the spine on which weights hang, and the gradients that came by, one for each output."""

    node: Node
    weights: list[nn.Parameter]
    gradients: list[Tensor | None]


class SplitBackward:
    """One microbatch's way back through a stage, from `outputs` with their `gradients`."""

    def __init__(
        self, outputs: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        self._outputs, self._gradients, self._inputs = list(outputs), list(gradients), list(inputs)
        self._kept, self._shared = _hanging(self._outputs, self._inputs)

    def for_inputs(self) -> list[Tensor | None]:
        """The gradient of each input."""
        if not self._inputs or not self._outputs:
            return [None] * len(self._inputs)
        hooks = [kept.node.register_prehook(kept.gradients.extend) for kept in self._kept]
        try:
            found = torch.autograd.grad(
                self._outputs, self._inputs, self._gradients, retain_graph=True, allow_unused=True
            )
        finally:
            for hook in hooks:
                hook.remove()
        return list(found)

    def for_weights(self) -> None:
        """Add to the gradient of each weight, in one go, once each."""
        weights: list[nn.Parameter] = []
        gradients: list[Tensor] = []
        for weight, gradient in self._found():
            if gradient is not None:
                weights.append(weight)
                gradients.append(gradient)
        self._kept = []
        if weights:  # through autograd, so that whoever listens to the weights' gradients hears of them
            torch.autograd.backward(weights, gradients)

    def _found(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        for kept in self._kept:
            known = [(GradientEdge(kept.node, i), g) for i, g in enumerate(kept.gradients) if g is not None]
            if not known:
                continue
            # What was kept has been through the hooks of tensors; they run again now, and it is put back.
            hook = kept.node.register_prehook(lambda _, gradients=tuple(kept.gradients): gradients)
            try:
                found = list(_gradients([edge for edge, _ in known], [g for _, g in known], kept.weights))
            finally:
                hook.remove()
            yield from found
        if self._shared:  # several ways lead to them, so all of the graph is walked
            yield from _gradients(self._outputs, self._gradients, self._shared)


def _gradients(
    outputs: list[GradientEdge], gradients: list[Tensor], weights: list[nn.Parameter]
) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
    found = torch.autograd.grad(outputs, weights, gradients, retain_graph=True, allow_unused=True)
    yield from zip(weights, found, strict=True)


def _hanging(
    outputs: Sequence[GradientEdge], inputs: Sequence[Tensor]
) -> tuple[list[_Kept], list[nn.Parameter]]:
    """The nodes of the spine on which weights hang, and the weights that hang on several or on none."""
    ends = {get_gradient_edge(tensor).node for tensor in inputs}
    order = _inner_first([edge.node for edge in outputs])
    spine: set[Node] = set()
    weights_of: dict[Node, dict[nn.Parameter, None]] = {}  # below a node, off the spine
    for node in order:
        below = [child for child, _ in node.next_functions if child is not None]
        if node in ends or any(child in spine for child in below):
            spine.add(node)
        own = getattr(node, "variable", None)
        found = {own: None} if isinstance(own, nn.Parameter) and node not in ends else {}
        for child in below:
            if child not in spine:
                found |= weights_of[child]
        weights_of[node] = found
    roots = {edge.node for edge in outputs} - spine
    users = [weights_of[node] for node in order if node in spine or node in roots]
    times: dict[nn.Parameter, int] = {}
    for weight in (weight for weights in users for weight in weights):
        times[weight] = times.get(weight, 0) + 1
    off_spine = {weight for root in roots for weight in weights_of[root]}
    shared = {weight for weight, count in times.items() if count > 1 or weight in off_spine}
    kept = [_Kept(n, [w for w in weights_of[n] if w not in shared], []) for n in order if n in spine]
    return [node for node in kept if node.weights], [weight for weight in times if weight in shared]


def _inner_first(roots: Sequence[Node]) -> list[Node]:
    """Every node below `roots`, each after all that is below it."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    return order
