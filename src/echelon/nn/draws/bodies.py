"""Functions of torch.nn.functional that are written in Python, and draw inside.

A mode sees the call of such a function, and nothing inside of it: it is off while it handles a call. Here is
the same code without the question for modes, so that it can be run with the mode on.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch.nn import functional as F

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _without_question(function: Any) -> Callable[..., Any]:
    names = function.__globals__ | dict.fromkeys(_QUESTIONS, lambda *_: False)
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_functional: Any = F  # also its private functions
BODIES: dict[Callable[..., Any], Callable[..., Any]] = {
    function: _without_question(function)
    for function in (
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        F.gumbel_softmax,
        F.rrelu,
        F.multi_head_attention_forward,
        F.fractional_max_pool2d_with_indices,
        F.fractional_max_pool3d_with_indices,
    )
} | {
    F.fractional_max_pool2d: _without_question(_functional._fractional_max_pool2d),
    F.fractional_max_pool3d: _without_question(_functional._fractional_max_pool3d),
}
