"""Kernels start on the device of their tensors; without a GPU there is nothing to switch."""

from contextlib import nullcontext

import torch

from echelon.nn.triton_support import has_triton, on_device_of


def test_a_tensor_in_host_memory_switches_no_device() -> None:
    assert isinstance(on_device_of(torch.zeros(1)), nullcontext)


def test_triton_is_asked_for_once() -> None:
    has_triton.cache_clear()
    assert has_triton() is has_triton()
    assert has_triton.cache_info().misses == 1
