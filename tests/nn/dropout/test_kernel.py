"""The kernel for CUDA devices keeps what the mask keeps. Here a stand-in for Triton runs it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.nn.dropout.mask import Draw, mask_of
from echelon.nn.hashing import hash_of, signed
from tests.nn.dropout.triton_stand_in import kernel_on_cpu

KEY = hash_of(1, 2, 3, 0)
SHAPES = [(3, 40), (7, 50), (5,), (3, 33), (2, 5, 6), (2, 5, 3), (3, 4, 3, 6), (3, 4, 3, 5), (2, 3, 1)]


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    with kernel_on_cpu() as module:
        yield module


def assert_masked(kernel: Any, x: Tensor, draw: Draw) -> None:
    output = torch.full_like(x, torch.nan)
    kernel.drop_into(output, x, draw)
    assert torch.equal(output, x * mask_of(draw, x.shape, "cpu") * draw.scale)


@pytest.mark.parametrize("words", [4, 1024])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_keeps_what_the_mask_keeps(
    kernel: Any, shape: tuple[int, ...], words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_MOST_WORDS", words)
    assert_masked(kernel, torch.randn(shape), Draw(KEY, 4, 0.3))


@pytest.mark.parametrize("words", [2, 1024])
@pytest.mark.parametrize("part", [None, (0, 2), (1, 2), (2, 3)])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if len(shape) > 2])
def test_it_keeps_what_the_mask_keeps_of_parts(
    kernel: Any,
    shape: tuple[int, ...],
    part: tuple[int, int] | None,
    words: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel, "_MOST_WORDS", words)
    for indices in (None, torch.arange(shape[1]) * 2 + 1):
        assert_masked(kernel, torch.randn(shape), Draw(KEY, 4, 0.3, indices, part))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_types_are_scaled_as_they_are_elsewhere(kernel: Any, dtype: torch.dtype) -> None:
    """A double is scaled by a double: a float argument of a kernel has 32 bits."""
    assert_masked(kernel, torch.randn(4, 10).to(dtype), Draw(KEY, 0, 0.1))


@pytest.mark.parametrize("p", [1e-12, 0.5, 1.0])
def test_probabilities_at_the_edges(kernel: Any, p: float) -> None:
    assert_masked(kernel, torch.randn(4, 10), Draw(KEY, 0, p))


def test_the_first_sample_may_be_on_the_device(kernel: Any) -> None:
    x = torch.randn(4, 10)
    outputs = [torch.empty_like(x) for _ in range(2)]
    for output, first in zip(outputs, (7, torch.tensor(7)), strict=True):
        kernel.drop_into(output, x, Draw(KEY, first, 0.5))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("key", [5, 2**64 - 7, KEY])
def test_the_key_may_be_on_the_device(kernel: Any, key: int) -> None:
    x = torch.randn(4, 10)
    outputs = [torch.empty_like(x) for _ in range(2)]
    for output, either in zip(outputs, (key, torch.tensor(signed(key))), strict=True):
        kernel.drop_into(output, x, Draw(either, 1, 0.5))
    assert torch.equal(*outputs)
    assert torch.equal(outputs[0], x * mask_of(Draw(torch.tensor(signed(key)), 1, 0.5), x.shape, "cpu") * 2)


def test_it_may_work_in_place(kernel: Any) -> None:
    x = torch.randn(4, 10)
    expected = x * mask_of(Draw(KEY, 0, 0.5), x.shape, "cpu") * 2
    kernel.drop_into(x, x, Draw(KEY, 0, 0.5))
    assert torch.equal(x, expected)


def test_what_is_not_a_number_stays_none(kernel: Any) -> None:
    x = torch.full((4, 10), torch.inf)
    output = torch.empty_like(x)
    with pytest.warns(RuntimeWarning, match="invalid value"):  # numpy's
        kernel.drop_into(output, x, Draw(KEY, 0, 0.5))
    assert torch.equal(output.isnan(), ~mask_of(Draw(KEY, 0, 0.5), x.shape, "cpu"))


def test_one_sample_of_a_long_sequence_fits(kernel: Any) -> None:
    """It has more tiles than CUDA starts in the second dim of a grid."""
    draw = Draw(KEY, 0, 0.5)
    assert kernel.fits((1, 32_768, 4_096), draw)
    assert kernel.fits((8, 2**28), draw)
    assert kernel.fits((1, 2**31 - 4096), draw)


def test_more_programs_than_cuda_starts_do_not_fit(kernel: Any) -> None:
    draw = Draw(KEY, 0, 0.5)
    assert not kernel.fits((1, 2**31), draw), "32 bits do not count the elements"
    assert kernel.fits((2**31 - 1, 1), draw)
    assert not kernel.fits((2**31, 1), draw)
    assert kernel.fits((2**11 - 1, 2**31 - 4096), draw)
    assert not kernel.fits((2**12, 2**31 - 4096), draw)
    assert not kernel.fits((2**11, 2**20, 8), draw._replace(indices=torch.arange(2)))


def test_programs_count_tiles_of_one_run_then_of_the_next(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three programs for each of two runs; the last tile of a run ends in the middle."""
    monkeypatch.setattr(kernel, "_MOST_WORDS", 4)
    grids: list[tuple[int, ...]] = []
    launch = type(kernel._drop).__getitem__
    monkeypatch.setattr(
        type(kernel._drop), "__getitem__", lambda self, grid: grids.append(grid) or launch(self, grid)
    )
    assert_masked(kernel, torch.randn(2, 18), Draw(KEY, 4, 0.3))
    assert grids == [(6,)]
