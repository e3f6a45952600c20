"""The kernels pool as torch does, bit for bit: in Triton's interpreter, where there is no GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from echelon.memory.gist import backend
from echelon.memory.gist.functions import Window

WINDOWS = (
    Window.of(2),
    Window.of(3, 2, 1, ceil_mode=True),
    Window.of(3, 1, 1),
    Window.of((4, 2), (1, 3), (2, 0)),
)
_aten = torch.ops.aten


def check_pooling(device: str) -> None:
    """Both kernels against torch's, on numbers, ties, infinities and NaN."""
    for window, dtype in product(WINDOWS, (torch.float32, torch.float64)):
        x = torch.randn(2, 2, 9, 11, device=device, dtype=dtype)
        ties = torch.randint(0, 3, x.shape, device=device).to(dtype)
        special = ties.clone()
        special[..., ::3], special[..., 1, ::2] = -torch.inf, torch.nan
        for values in (x, x[0], ties, special, torch.full_like(x, -torch.inf)):
            check_equal(values.contiguous(), window)
    check_equal(torch.randn(3, 8, 8, device=device).half(), WINDOWS[1])


def check_equal(x: Tensor, window: Window) -> None:
    from echelon.memory.gist import pooling

    assert pooling.suits(x, window)
    expected, indices = _aten.max_pool2d_with_indices(x, *window)
    output, places = pooling.max_pool(x, window)
    assert torch.equal(output.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(backend.window_indices(places, window, output.size(), x.shape[-1]), indices)
    gradient = torch.randn_like(output)
    wide = gradient if gradient.dtype.itemsize > 2 else gradient.float()  # in which a device adds
    sums = _aten.max_pool2d_with_indices_backward(wide, x.to(wide.dtype), *window, indices).to(x.dtype)
    assert torch.equal(pooling.max_pool_backward(gradient, places, window, x.size(), output.size()), sums)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_pooling_in_the_interpreter() -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    code = "from tests.memory.gist.test_pooling import check_pooling; check_pooling('cpu')"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=Path(__file__).parents[3], check=True)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_what_is_left_to_torch() -> None:
    from echelon.memory.gist import pooling

    x = torch.randn(2, 2, 9, 11)
    assert pooling.suits(x, Window.of(3, 2))
    assert not pooling.suits(x.to(memory_format=torch.channels_last), Window.of(3, 2))
    assert not pooling.suits(x[0, 0], Window.of(3, 2))
    assert not pooling.suits(x.long(), Window.of(3, 2))
    for window in (Window.of(5), Window.of(3, dilation=2), Window.of(2, padding=2), Window.of((16, 1))):
        assert not pooling.suits(x, window)
