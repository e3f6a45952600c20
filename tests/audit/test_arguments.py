"""Arguments of a layer, copied: the layer may overwrite them, and the gradients of inputs can be taken."""

import torch
from torch import Tensor

from echelon.audit.arguments import copy_arguments


class Cache:
    """As transformers has them: it remembers what layers before this one have computed."""

    def __init__(self, kept: list[dict[str, Tensor]]) -> None:
        self.kept = kept


def same(tensor: Tensor) -> Tensor:
    return tensor


def test_what_has_a_gradient_becomes_a_leaf_that_may_be_overwritten() -> None:
    source = torch.ones(3, requires_grad=True)
    hidden, mask = source * 2, torch.zeros(3)
    copied = copy_arguments((hidden,), {"mask": mask}, same)
    with torch.enable_grad():
        output = copied.args[0].add_(1).sum()
    (gradient,) = torch.autograd.grad(output, copied.leaves)
    assert gradient.tolist() == [1.0] * 3
    copied.kwargs["mask"].add_(1)
    assert not copied.kwargs["mask"].requires_grad
    assert (hidden.tolist(), mask.tolist()) == ([2.0] * 3, [0.0] * 3)


def test_caches_of_tensors_with_a_history_are_copied() -> None:
    cache = Cache([{"keys": torch.ones(2, requires_grad=True) * 3}])
    copied = copy_arguments((), {"cache": cache}, same).kwargs["cache"]
    copied.kept[0]["keys"].zero_()
    copied.kept.append({})
    assert len(cache.kept) == 1
    assert cache.kept[0]["keys"].tolist() == [3.0, 3.0]
