"""The leaves of a graph: the tensors that a backward pass adds gradients to, and how often it comes by."""

from collections import Counter
from collections.abc import Iterable, Sequence, Set

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node


def leaf_uses(roots: Iterable[Node | None]) -> Counter[Tensor]:
    """Return how many edges of the graph below these nodes lead to each leaf."""
    uses: Counter[Tensor] = Counter()
    pending, seen = list(roots), set[Node]()
    while pending:
        node = pending.pop()
        leaf = getattr(node, "variable", None)  # of AccumulateGrad alone
        if isinstance(leaf, Tensor):
            uses[leaf] += 1
        elif node is not None and node not in seen:
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
    return uses


def used_once(outputs: Sequence[GradientEdge]) -> Set[Tensor]:
    """Return the leaves that get one product from a backward pass, and no sum of several. What a reentrant
    checkpoint uses is not in the graph, and not among them."""
    return {leaf for leaf, number in leaf_uses(edge.node for edge in outputs).items() if number == 1}
