"""Gradients of gradients: what cannot be differentiated twice is said in a sentence."""

from collections.abc import Iterator
from contextlib import contextmanager

from echelon.errors import UserError

_TORCH_SAYS = "differentiate twice"


@contextmanager
def explain_second_order() -> Iterator[None]:
    """Around forward and backward passes."""
    try:
        yield
    except RuntimeError as error:
        if _TORCH_SAYS not in str(error):
            raise
        raise UserError(
            "the model or loss differentiates a gradient (torch.autograd.grad with create_graph=True), and "
            "its way leads through an operation that can be differentiated once: ring attention "
            "(attention=all-to-all can be differentiated twice), echelon's own cross entropy, or a function "
            "of the model that is marked once_differentiable; keep it out of that gradient, or use a plan "
            "without context and tensor"
        ) from error
