"""Where the host must not wait for the device."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waiting_raises() -> Iterator[None]:
    """Inside, torch raises where the host would wait."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this does not find every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
