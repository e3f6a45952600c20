"""The kernels write the bytes of the torch operations: in Triton's interpreter, where there is no GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import torch

from echelon.memory.gist import backend, floats, packing
from echelon.memory.gist.functions import Window
from echelon.memory.gist.packing import flatten

NUMBERS = (1, 127, 128, 129, 1000, 3 * 1024 + 1, 9001)
WINDOWS = (Window.of(2), Window.of(3, 2, 1, ceil_mode=True), Window.of((5, 4), 1, (2, 0), (1, 2)))


def numbers(num: int, dtype: torch.dtype) -> torch.Tensor:
    """Of all sizes, with some that no format has."""
    torch.manual_seed(num)
    values = torch.randn(num) * torch.exp2(torch.randint(-40, 20, (num,)).float())
    values[::7] = 0
    special = [float("nan"), float("inf"), -1e30, 65520.0, -0.0]
    values[: min(num, 5)] = torch.tensor(special[: min(num, 5)])
    values[200:300] = -torch.finfo(dtype).max
    return values.to(dtype)


def check_kernels(device: str, sizes: tuple[int, ...] = NUMBERS) -> None:
    """Every kernel against the torch operations."""
    from echelon.memory.gist import kernels

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for num, dtype, name in product(sizes, dtypes, ("fp16", "fp10", "fp8")):
        if floats.format_for(dtype, name) is None:
            continue
        flat, layout = flatten(numbers(num, dtype))
        expected, parts = floats.encode(flat, name), kernels.encode_floats(flat.to(device), name)
        decoded = kernels.decode_floats(parts, name, layout, dtype).cpu()
        assert torch.equal(decoded.nan_to_num(7.0), floats.decode(expected, name, num, dtype).nan_to_num(7.0))
        is_real = [not bool(flat.isnan().any())] * len(parts)
        assert all(
            torch.equal(a, b.cpu()) for a, b, real in zip(expected, parts, is_real, strict=True) if real
        )
    for num in sizes:
        flat = numbers(num, torch.float32)
        output, mask, layout = kernels.relu_and_mask(flat.to(device), inplace=False)
        assert torch.equal(output.cpu().nan_to_num(7.0), flat.relu().nan_to_num(7.0))
        assert torch.equal(mask.cpu(), packing.pack(~(flat.relu() <= 0), 1))
        for name in ("fp16", "fp8"):
            again, same_mask, _, parts = kernels.encoded_relu(flat.to(device), name)
            assert torch.equal(again.nan_to_num(7.0), output.nan_to_num(7.0))
            assert torch.equal(same_mask, mask)
            written, expected = parts[0].cpu(), floats.encode(flat.relu(), name)[0]
            if name == "fp8":  # of which sign NaN is, nobody asks
                written, expected = (each.view(torch.float8_e4m3fn).float() for each in (written, expected))
                assert torch.equal(parts[1].cpu(), floats.encode(flat.relu(), name)[1])
            assert torch.equal(written.nan_to_num(7.0), expected.nan_to_num(7.0))
        gradient = torch.randn(num)
        again = kernels.masked(gradient.to(device), mask, layout).cpu()
        assert torch.equal(again, backend.masked(gradient, mask.cpu(), layout))
    for window in WINDOWS:
        x = torch.randn(2, 3, 17, 19)
        output, indices = torch.ops.aten.max_pool2d_with_indices(x, *window)
        _, expected_places = backend.max_pool(x, window)
        places = kernels.window_places(indices.to(device), window, x.shape[-1])
        assert torch.equal(places.cpu(), expected_places)
        again = kernels.window_indices(places, window, output.shape, x.shape[-1])
        assert torch.equal(again.cpu(), indices)
    for x, gradient in product(layouts(device), layouts(device)):
        output, mask, layout = kernels.relu_and_mask(x, inplace=False)
        expected = x.relu()
        assert output.stride() == expected.stride()
        assert torch.equal(output, expected)
        assert torch.equal(mask, packing.pack(flatten(expected)[0] > 0, 1))
        masked = kernels.masked(gradient, mask, layout)
        expected = torch.ops.aten.threshold_backward(gradient, expected, 0)
        assert masked.stride() == expected.stride()
        assert torch.equal(masked, expected)


def layouts(device: str) -> list[torch.Tensor]:
    """Of one shape: contiguous, channels_last, transposed, with gaps, and expanded."""
    x = torch.randn(2, 8, 6, 5, device=device)
    gaps = torch.randn(2, 8, 5, 12, device=device).transpose(2, 3)[:, :, ::2]
    return [
        x,
        x.to(memory_format=torch.channels_last),
        x.transpose(2, 3).contiguous().transpose(2, 3),
        gaps,
        x[:, :, :1].expand(-1, -1, 6, -1),
    ]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_in_the_interpreter() -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    code = "from tests.memory.gist.test_kernels import check_kernels; check_kernels('cpu')"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=Path(__file__).parents[3], check=True)
