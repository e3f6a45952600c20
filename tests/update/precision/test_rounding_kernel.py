"""The kernel for CUDA devices rounds as `rounding` does. Here a stand-in for Triton runs it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import echelon.update.precision
from echelon.nn.hashing import hash_of
from echelon.update.precision.rounding import ElementRuns, _round
from tests.nn.dropout.triton_stand_in import kernel_on_cpu

KEY = hash_of(1, 2, 3)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    with kernel_on_cpu(echelon.update.precision, "rounding_kernel") as module:
        yield module


@pytest.mark.parametrize("words", [2, 512])
@pytest.mark.parametrize("length", [1, 4, 7, 33])
@pytest.mark.parametrize("step", [40, 43])
def test_it_rounds_as_the_expression_does(
    kernel: Any, length: int, step: int, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_MOST_WORDS", words)
    source = torch.randn(5 * length + 3)
    source[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    source.view(torch.int32)[0] = 0x7F800001  # not a number by its last bit alone
    runs = ElementRuns(torch.arange(5) * length, 2**33 + torch.arange(5) * step, length)
    expected, target = (torch.zeros(len(source), dtype=torch.bfloat16) for _ in range(2))
    _round(expected, source, KEY, runs)
    kernel.round_runs(target, source, KEY, runs)
    assert torch.equal(target.view(torch.int16), expected.view(torch.int16))
    assert torch.equal(target[5 * length :], torch.zeros(3, dtype=torch.bfloat16)), "what is in no run"


def test_there_are_as_many_programs_as_tiles(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four elements are a word, and the first of a run may begin before it."""
    grids = []
    launch = type(kernel._round).__getitem__
    monkeypatch.setattr(
        type(kernel._round), "__getitem__", lambda *given: grids.append(given[1]) or launch(*given)
    )
    for length in (1, 2, 4 * 512 - 3, 4 * 512 - 2, 4 * 1024 - 3, 4 * 1024 - 2):
        source = torch.ones(length)
        runs = ElementRuns(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), length)
        kernel.round_runs(torch.empty(length, dtype=torch.bfloat16), source, KEY, runs)
    assert grids == [(1,), (1,), (1,), (2,), (2,), (3,)]
