"""autocast around a step: the type in which it computes, without torch's cache of weights that were cast.

The cache lives as long as the outermost autocast: the second microbatch would use what the first one has
cast, and so would the next step, after an update. And the gradient of a weight would come after all of its
uses, when zero=3 has freed it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Inside, every use of a weight casts it."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def computed_type(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The coarsest type of what is computed on `device` for weights of `dtype`."""
    if dtype == torch.float64 or not torch.is_autocast_enabled(device.type):  # which casts no float64
        return dtype
    return max(dtype, torch.get_autocast_dtype(device.type), key=lambda each: torch.finfo(each).eps)
