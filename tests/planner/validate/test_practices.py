"""Programs by source."""

import pytest

from echelon.planner.foresight.practice import (
    DEEPSPEED_2021,
    FOUNDRY,
    FOUNDRY_HOPPER,
    MEGATRON,
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_2026,
    MEGATRON_UNFUSED,
    TORCHTITAN,
    Practice,
    with_slow_samples,
)
from echelon.planner.validate.practices import practice_of


@pytest.mark.parametrize(
    ("row", "practice"),
    [
        ({"source": "torchtitan 2024-12"}, TORCHTITAN),
        ({"source": "Megatron-LM SC21", "zero_stage": "0"}, MEGATRON_2021),
        ({"source": "Megatron-LM SC21", "zero_stage": "3"}, DEEPSPEED_2021),
        ({"source": "mosaicml", "gpu": "h100_80gb"}, FOUNDRY_HOPPER),
        ({"source": "a paper", "precision": "fp16", "recompute": "full"}, MEGATRON_2021),
        ({"source": "a paper", "precision": "bf16"}, MEGATRON),
        ({"source": "a paper", "gpu": "V100"}, MEGATRON_2021),
        ({"source": "a paper", "precision": "fp16", "recompute": "selective+SP"}, MEGATRON_2022),
        ({"source": "PyTorch FSDP", "gpu": "a100"}, FOUNDRY),
        ({"source": "NVIDIA Megatron-Bridge perf summary 26.06", "gpu": "DGX-GB200"}, MEGATRON_2026),
        ({"source": "NVIDIA Megatron-Bridge perf summary 26.06", "gpu": "DGX-H100"}, MEGATRON),
        ({"source": "NVIDIA Megatron-Bridge perf summary 26.04", "gpu": "DGX-GB200"}, MEGATRON),
        ({"source": "golden", "attention": "unfused"}, MEGATRON_UNFUSED),
        (
            {"source": "golden", "attention": "unfused", "host": "one node"},
            with_slow_samples(MEGATRON_UNFUSED),
        ),
    ],
)
def test_a_row_says_which_program_made_it(row: dict[str, str], practice: Practice) -> None:
    assert practice_of(row) is practice
