"""Stochastic rounding on a GPU is that of the CPU, bit for bit, and moves no more than it must."""

import pytest
import torch

from echelon.nn.hashing import hash_of
from echelon.update.precision.rounding import ElementRuns, _round, round_stochastically, whole_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KEY = hash_of(1, 2, 3)


@pytest.mark.parametrize("size", [1, 5, 4096, 1_000_003])
def test_whole_parameters(size: int) -> None:
    value = torch.randn(size)
    value[0] = torch.nan
    here, there = torch.empty(size, dtype=torch.bfloat16), torch.empty(size, dtype=torch.bfloat16).cuda()
    round_stochastically(here, value, KEY, [whole_run(value)])
    round_stochastically(there, value.cuda(), KEY, [whole_run(there)])
    assert torch.equal(there.cpu().view(torch.int16), here.view(torch.int16))


@pytest.mark.parametrize(("length", "step"), [(7, 40), (4096, 8192), (33, 43)])
def test_runs(length: int, step: int) -> None:
    value = torch.randn(50 * length)
    runs = ElementRuns(torch.arange(50) * length, 2**33 + torch.arange(50) * step, length)
    on_device = ElementRuns(runs.in_part.cuda(), runs.in_whole.cuda(), length)
    results = [torch.zeros(len(value), dtype=torch.bfloat16) for _ in range(2)]
    round_stochastically(results[0], value, KEY, [runs])
    there = results[1].cuda()
    round_stochastically(there, value.cuda(), KEY, [on_device])
    assert torch.equal(there.cpu(), results[0])
    without_kernel = torch.zeros_like(there)
    _round(without_kernel, value.cuda(), KEY, on_device)
    assert torch.equal(without_kernel, there)


def test_it_takes_little_more_time_than_its_bytes() -> None:
    """Reads 4 bytes and writes 2 of each element: compared with a plain conversion, which does too."""
    value = torch.randn(2**28, device="cuda")
    weight = torch.empty(2**28, dtype=torch.bfloat16, device="cuda")
    runs = [whole_run(value)]

    def seconds(function: object) -> float:
        times = []
        for _ in range(10):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()  # type: ignore[operator]
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return sorted(times)[len(times) // 2]

    assert seconds(lambda: round_stochastically(weight, value, KEY, runs)) < 2 * seconds(
        lambda: weight.copy_(value)
    )
