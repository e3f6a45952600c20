"""Masks are the same on every device, also those of the kernel; and it waits for nothing."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from echelon.nn.dropout.mask import Draw, drop, has_kernel, mask_of
from echelon.nn.dropout.modules import KeyedDropout, key_dropout
from echelon.nn.dropout.training_position import scope
from echelon.nn.hashing import hash_of
from echelon.nn.wrapping import Wrapping, find_wrapper
from tests.nn.dropout.masks import keep_mask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KEY = hash_of(1, 2, 3, 0)
SHAPES = [(64, 128, 768), (7, 33), (5,), (2, 5, 6), (2, 5, 3), (3, 4, 3, 6), (3, 4, 3, 5), (70_000, 8)]


@pytest.mark.parametrize("shape", [(64, 128, 768), (7, 33), (5,)])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_masks_are_those_of_the_cpu(shape: tuple[int, ...], p: float) -> None:
    here = keep_mask(1, 2, 3, 4, shape, p, "cuda")
    assert torch.equal(here.cpu(), keep_mask(1, 2, 3, 4, shape, p, "cpu"))


def assert_dropped(x: Tensor, draw: Draw) -> None:
    """By the kernel, what the mask of the CPU keeps."""
    assert has_kernel(x)
    indices = None if draw.indices is None else draw.indices.cpu()
    first = int(draw.first_sample)
    keep = mask_of(draw._replace(indices=indices, first_sample=first), x.shape, "cpu").cuda()
    torch.testing.assert_close(drop(x, draw), x * keep * draw.scale)
    assert torch.equal(drop(torch.ones_like(x), draw) != 0, keep)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_keeps_what_the_mask_keeps(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, device="cuda").to(dtype)
    for first in (4, torch.tensor(4, device="cuda")):
        assert_dropped(x, Draw(KEY, first, 0.3))


@pytest.mark.parametrize("part", [None, (0, 2), (1, 2), (2, 3)])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if len(shape) > 2])
def test_the_kernel_keeps_what_the_mask_keeps_of_parts(
    shape: tuple[int, ...], part: tuple[int, int] | None
) -> None:
    for indices in (None, torch.arange(shape[1], device="cuda") * 2 + 1):
        assert_dropped(torch.randn(shape, device="cuda"), Draw(KEY, 4, 0.3, indices, part))


def test_the_kernel_drops_one_sample_of_a_long_sequence() -> None:
    from echelon.nn.dropout import kernel

    x, draw = torch.ones(1, 32_768, 4_097, device="cuda", dtype=torch.bfloat16), Draw(KEY, 4, 0.3)
    assert kernel.fits(x.shape, draw)
    assert torch.equal(drop(x, draw) != 0, mask_of(draw, x.shape, "cuda"))


@pytest.mark.parametrize("p", [1e-12, 0.5, 1.0])
def test_the_kernel_at_the_edges(p: float) -> None:
    assert_dropped(torch.randn(4, 10, device="cuda"), Draw(KEY, 0, p))


@pytest.mark.parametrize("inplace", [False, True])
def test_a_module_drops_in_one_pass_keeps_nothing_and_waits_for_nothing(inplace: bool) -> None:
    model = nn.Sequential(nn.Dropout(0.3, inplace=inplace))
    key_dropout(model, Wrapping())
    x = torch.randn(4, 6, 8, device="cuda", requires_grad=True)
    keyed = find_wrapper(model[0], KeyedDropout)
    assert keyed is not None
    keep = keep_mask(0, 1, keyed.layer, 2, x.shape, 0.3).cuda()
    first = torch.tensor(2, device="cuda")
    saved: list[Tensor] = []

    def run() -> tuple[Tensor, Tensor]:
        with scope(seed=0, step=1, first_sample=first):
            output = model(x * 2)
        return output, torch.autograd.grad(output.sum(), x)[0]

    run()  # compiles the kernel
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this does not find every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            output, gradient = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [each for each in saved if each.numel() > 1] == []
    torch.testing.assert_close(output, 2 * x * keep / 0.7)
    torch.testing.assert_close(gradient, 2 * keep / 0.7)


def test_strides_stay_and_tensors_that_are_not_contiguous_are_dropped_too() -> None:
    x = torch.randn(5, 4, 6, device="cuda").transpose(1, 2)
    assert drop(x, Draw(KEY, 4, 0.3)).stride() == x.stride()
    assert_dropped(x, Draw(KEY, 4, 0.3))
