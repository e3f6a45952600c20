"""Weights with hooks of the user's own: a rank's part of a weight has only a part of the gradient."""

from collections.abc import Iterator, Mapping

from torch import nn

from echelon.parallel.tensor.shards import cuts
from echelon.parallel.tensor.styles import Style


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether something is called with its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def hooked_weights(model: nn.Module, style_of: Mapping[nn.Module, Style]) -> Iterator[str]:
    """An error for every weight with a hook that would be split: the hook is written for the whole one."""
    for name, module in model.named_modules():
        for cut in cuts(module, style_of[module]) if module in style_of else ():
            parameter = module._parameters.get(cut.name)
            if parameter is not None and has_hooks(parameter):
                path = f"{name}.{cut.name}".lstrip(".")
                yield (
                    f"{path}: has a hook on its gradient, of which each rank would have only a part; remove "
                    f"the hook, or make the module 'replicated' (tensor_table={{'{name}': 'replicated'}})"
                )
