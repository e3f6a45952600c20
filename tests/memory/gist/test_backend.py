"""The encodings in torch operations, against what torch computes and saves itself."""

import pytest
import torch
from torch import Tensor

from echelon.memory.gist import backend, floats
from echelon.memory.gist.functions import Window
from echelon.memory.gist.packing import flatten


def values() -> Tensor:
    x = torch.randn(2, 3, 8, 9, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0, :3] = torch.tensor([0.0, -0.0, float("nan")])
    return x


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_mask_of_bits_gives_the_gradient_of_a_relu(memory_format: torch.memory_format) -> None:
    x, gradient = values().to(memory_format=memory_format), torch.ones(2, 3, 8, 9)
    output, mask, layout = backend.relu_and_mask(x, inplace=False)
    assert torch.equal(output.nan_to_num(7.0), x.relu().nan_to_num(7.0))
    assert (mask.dtype, len(mask)) == (torch.uint8, x.numel() // 8)
    expected = torch.ops.aten.threshold_backward(gradient, x.relu(), 0)
    assert torch.equal(backend.masked(gradient, mask, layout), expected)
    in_place, same_mask, _ = backend.relu_and_mask(x, inplace=True)
    assert in_place is x
    assert torch.equal(same_mask, mask)


def test_an_encoded_relu_has_the_same_mask_and_its_output_in_fewer_bits() -> None:
    x = values()
    _, mask, _ = backend.relu_and_mask(x, inplace=False)
    output, same_mask, layout, parts = backend.encoded_relu(x, "fp16")
    assert torch.equal(same_mask, mask)
    decoded = backend.decode_floats(parts, "fp16", layout, torch.float32)
    assert torch.equal(decoded.nan_to_num(7.0), output.half().float().nan_to_num(7.0))


@pytest.mark.parametrize("window", [Window.of(2), Window.of(3, 2, 1), Window.of((5, 4), 1, (2, 0), (1, 2))])
def test_the_place_in_a_window_gives_the_index_in_the_input(window: Window) -> None:
    x = values().nan_to_num(0.5)
    expected, indices = torch.ops.aten.max_pool2d_with_indices(x, *window)
    output, places = backend.max_pool(x, window)
    assert torch.equal(output, expected)
    assert places.dtype == torch.uint8
    assert torch.equal(backend.window_indices(places, window, output.shape, x.shape[-1]), indices)


def test_the_exact_form_of_float64_keeps_all_bits() -> None:
    x = values().double()
    parts = backend.encode_floats(x, floats.EXACT)
    back = backend.decode_floats(parts, floats.EXACT, flatten(x)[1], torch.float64)
    assert torch.equal(back.view(torch.int64), x.view(torch.int64))
