"""A backward pass in two: gradients for the inputs first, those for the weights later.

The graph of a stage, from its outputs down:

    outputs ─ node ─ node ─ … ─ inputs        [1] the spine: what leads to the inputs
                │      │
              weight  weight                  [2] what hangs on it: leads to weights, never to an input

The first pass walks the spine alone and keeps the gradients that come by at each node on which weights hang.
The second takes each of those nodes once more, towards its weights only.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class _Kept(NamedTuple):
    """A node of the spine on which weights hang, and the gradients that came by, one for each output."""

    node: Node
    weights: list[Tensor]
    gradients: list[Tensor | None]


class SplitBackward:
    """One microbatch's way back through a stage, from `outputs` with their `gradients`.

    `is_hooked`: tensors of the forward have hooks. A node on which weights hang runs twice, once for either
    half, and hooks must run once, with all gradients: such a backward pass is not split.
    """

    def __init__(
        self,
        outputs: Sequence[GradientEdge],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        *,
        is_hooked: bool = False,
    ) -> None:
        self._outputs, self._gradients, self._inputs = list(outputs), list(gradients), list(inputs)
        graph = _analyse(self._outputs, self._inputs)
        self._kept, self._shared = graph.kept, graph.shared
        self._is_whole = bool(self._inputs) and (is_hooked or graph.needs_one_pass())

    def for_inputs(self) -> list[Tensor | None]:
        """The gradient of each input. Where the pass is not split, weights get theirs now."""
        if not self._inputs or not self._outputs:
            return [None] * len(self._inputs)
        if self._is_whole:
            return self._both()
        # A prehook runs when all gradients of a node are added up; this one returns None: it changes none.
        hooks = [kept.node.register_prehook(kept.gradients.extend) for kept in self._kept]
        # Edges, as autograd.grad of tensors turns torch.device(…) off until it ends, and layers that
        # recompute in it would run on another device than they did.
        inputs = [get_gradient_edge(tensor) for tensor in self._inputs]
        try:
            found = torch.autograd.grad(
                self._outputs, inputs, self._gradients, retain_graph=True, allow_unused=True
            )
        finally:
            for hook in hooks:
                hook.remove()
        return list(found)

    def for_weights(self) -> None:
        """Add to the gradient of each weight, once each, from the outputs down as one pass would. The walk of
        the whole graph is first: after it, weights may be updated as soon as their gradient is there."""
        if self._is_whole or not self._outputs:
            return
        if not self._inputs:  # nothing was walked yet
            torch.autograd.backward(self._outputs, self._gradients)
            return
        if self._shared:  # several ways lead to them, so all of the graph is walked
            _accumulate(self._outputs, self._gradients, self._shared)
        for kept in reversed(self._kept):
            known = [(GradientEdge(kept.node, i), g) for i, g in enumerate(kept.gradients) if g is not None]
            if known:
                _accumulate([edge for edge, _ in known], [gradient for _, gradient in known], kept.weights)
        self._kept = []

    def _both(self) -> list[Tensor | None]:
        torch.autograd.backward(self._outputs, self._gradients)
        found = [tensor.grad for tensor in self._inputs]
        for tensor in self._inputs:
            tensor.grad = None
        return found


def _accumulate(outputs: list[GradientEdge], gradients: list[Tensor], weights: list[Tensor]) -> None:
    # Retained: several calls walk the same nodes. The graph is freed with its flight.
    torch.autograd.backward(outputs, gradients, retain_graph=True, inputs=weights)


class _Graph(NamedTuple):
    """The nodes of a stage; its spine; what there has weights on it; the weights that hang on several nodes
    of it, or on none."""

    nodes: list[Node]
    spine: list[Node]
    kept: list[_Kept]
    shared: list[Tensor]

    def needs_one_pass(self) -> bool:
        """Return whether a node that both halves run must not run twice: it has hooks, or recomputes by
        torch's reentrant checkpoint, which computes gradients of weights itself; or ranks take part in it
        together, and the others may have no reason to walk all of the graph again."""
        both = self.spine if self.shared else [kept.node for kept in self.kept]
        return any(map(_is_reentrant, self.nodes)) or have_hooks(both) or any(map(_runs_once, both))


def _is_reentrant(node: Node) -> bool:
    return type(node).__name__ == "CheckpointFunctionBackward"  # torch.utils.checkpoint's, use_reentrant=True


def _runs_once(node: Node) -> bool:
    """Return whether the function of a node says that its backward pass must run once."""
    return getattr(getattr(type(node), "_forward_cls", None), "runs_once", False)


def _analyse(outputs: Sequence[GradientEdge], inputs: Sequence[Tensor]) -> _Graph:
    ends = {get_gradient_edge(tensor).node for tensor in inputs}
    order = _inner_first([edge.node for edge in outputs])
    spine: set[Node] = set()
    weights_of: dict[Node, dict[Tensor, None]] = {}  # below a node, off the spine
    for node in order:
        below = [child for child, _ in node.next_functions if child is not None]
        if node in ends or any(child in spine for child in below):
            spine.add(node)
        own = getattr(node, "variable", None)  # of AccumulateGrad alone: its leaf
        found = {own: None} if isinstance(own, Tensor) and node not in ends else {}
        for child in below:
            if child not in spine:
                found |= weights_of[child]
        weights_of[node] = found
    roots = {edge.node for edge in outputs} - spine
    users = [weights_of[node] for node in order if node in spine or node in roots]
    times: dict[Tensor, int] = {}
    for weight in (weight for weights in users for weight in weights):
        times[weight] = times.get(weight, 0) + 1
    off_spine = {weight for root in roots for weight in weights_of[root]}
    shared = {weight for weight, count in times.items() if count > 1 or weight in off_spine}
    on_spine = [node for node in order if node in spine]
    # What hangs on a node with a shared one goes with it: its way back may read that one's values.
    shared |= {w for node in on_spine for w in weights_of[node] if not shared.isdisjoint(weights_of[node])}
    kept = [_Kept(node, [w for w in weights_of[node] if w not in shared], []) for node in on_spine]
    return _Graph(order, on_spine, [each for each in kept if each.weights], [w for w in times if w in shared])


def _inner_first(roots: Sequence[Node]) -> list[Node]:
    """Every node below `roots`, each after all that is below it."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]  # graphs exceed the recursion limit
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    return order


# Whether a forward pass hooks into its own backward pass: hooks on tensors, and on nodes of the graph.


class HookWatch:
    """`is_hooked`: a tensor that was computed while this watched has a hook, or keeps its gradient."""

    def __init__(self) -> None:
        self.is_hooked = False


@contextmanager
def watch_hooks() -> Iterator[HookWatch]:
    """Notice `register_hook` and `retain_grad` of tensors that are no leaves, until the end of the block."""
    watch = HookWatch()
    originals = {name: getattr(Tensor, name) for name in ("register_hook", "retain_grad")}
    inherited = [name for name in originals if name not in vars(Tensor)]
    for name, original in originals.items():
        setattr(Tensor, name, _noticed(watch, original))
    try:
        yield watch
    finally:
        for name, original in originals.items():
            if name in inherited:  # set, it would hide the base class's from then on
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, original)


def _noticed(watch: HookWatch, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        watch.is_hooked = watch.is_hooked or not tensor.is_leaf
        return original(tensor, *args, **kwargs)

    return call


def have_hooks(nodes: Iterable[Node]) -> bool:
    """Return whether one of these nodes has a hook, to be called before or after it."""
    return any(_has_others(node.register_prehook) or _has_others(node.register_hook) for node in nodes)


def _has_others(register: Callable[[Callable[..., None]], torch.utils.hooks.RemovableHandle]) -> bool:
    """Return whether there are hooks already: nodes do not list them, but the handle of a new one does."""
    handle = register(_do_nothing)
    try:
        hooks = handle.hooks_dict_ref()
        return hooks is not None and len(hooks) > 1
    finally:
        handle.remove()


def _do_nothing(*_: object) -> None:
    pass
