"""autocast around a step, without torch's cache of weights that were cast.

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
