from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch.distributed as dist

from benchmarks import step
from echelon.launching import Ranks, launch
from echelon.models.config import ModelConfig

WIDE = ModelConfig("gpt", layers=1, width=512, heads=2, vocab=64, sequence=16, tied=True)


def fake_memory(contender: str, _: ModelConfig) -> int:
    return len(contender) if dist.get_rank() == 0 else 0


def test_rows_compare_echelon_with_torch_on_one_and_on_two_ranks(
    warm_ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "measuring_ranks", lambda count: nullcontext(warm_ranks(count)))
    monkeypatch.setattr(step, "measure_memory", fake_memory)

    settings, rows = step.bench(quick=True)

    assert [(row.case, row.contender, row.baseline) for row in rows] == [
        ("1 device", "torch loop", "torch loop"),
        ("1 device", "echelon", "torch loop"),
        ("2 ranks, data=2", "torch DDP", "torch DDP"),
        ("2 ranks, data=2", "echelon", "torch DDP"),
    ]
    assert all(row.seconds.median > 0 for row in rows)
    assert [row.extras["peak_bytes"] for row in rows] == [10, 7, 9, 7]
    assert settings["parameters"] == step._SMALL.num_parameters


def test_the_measured_model_has_a_few_million_parameters() -> None:
    assert 3e6 < step._FULL.num_parameters < 4e6


@pytest.mark.slow
def test_memory_is_at_least_weights_gradients_and_optimizer() -> None:
    for contender in ("echelon", "torch loop"):
        [peak] = launch(step.measure_memory, 1, contender, WIDE)
        assert peak > 4 * 4 * WIDE.num_parameters
