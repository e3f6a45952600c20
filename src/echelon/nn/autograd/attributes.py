"""Functions of torch that read no values of a tensor: its shape, type, device, gradient and hooks."""

from collections.abc import Callable
from types import GetSetDescriptorType
from typing import Any

import torch
from torch import Tensor


def _functions_without_values() -> set[Callable[..., Any]]:
    """Those of all attributes but tensors of the values."""
    values = {"data", "T", "H", "mT", "mH", "real", "imag"}
    functions: set[Callable[..., Any]] = set()
    for name, attribute in vars(torch._C.TensorBase).items():
        if isinstance(attribute, GetSetDescriptorType) and name not in values:
            functions |= {attribute.__get__, attribute.__set__, attribute.__delete__}
    methods = (
        "dim ndimension size numel nelement stride storage_offset element_size untyped_storage get_device "
        "is_contiguous is_pinned is_floating_point is_complex is_signed is_inference is_conj is_neg _is_view "
        "requires_grad_ "
        "register_hook register_post_accumulate_grad_hook __len__ new_empty new_zeros new_ones new_full"
    )
    functions |= {getattr(Tensor, name) for name in methods.split()}
    makers = "empty_like zeros_like ones_like full_like rand_like randn_like"
    questions = "numel is_floating_point is_complex"
    return functions | {getattr(torch, name) for name in f"{makers} {questions}".split()}


FUNCTIONS_WITHOUT_VALUES = _functions_without_values()
