"""Which program made a published run: by what its row says of the source."""

import re
from collections.abc import Mapping

from echelon.planner.foresight.practice import (
    DEEPSPEED_2021,
    FOUNDRY,
    FOUNDRY_HOPPER,
    MEGATRON,
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_2026,
    MEGATRON_TESTS,
    MEGATRON_UNFUSED,
    MLPERF,
    TORCHTITAN,
    Practice,
    with_fused_loss,
    with_slow_samples,
)

_BY_SOURCE = (
    ("torchtitan", TORCHTITAN),
    ("MLPerf", MLPERF),
    ("foundry", FOUNDRY),
    ("mosaic", FOUNDRY),
    ("SC21", MEGATRON_2021),
    ("MT-NLG", MEGATRON_2021),
    ("BigScience", MEGATRON_2021),
    ("vTrain", MEGATRON_2021),
    ("Megatron-LM README 2022", MEGATRON_2021),
    ("Korthikanti", MEGATRON_2022),
)


_RELEASE = re.compile(r"Megatron-Bridge.* (\d\d)\.(\d\d)")
_FEWER_KERNELS = (26, 6)  # year and month of the release


def practice_of(row: Mapping[str, str]) -> Practice:
    """The program that a row is of; where it does not say, one of the time of its device and types."""
    if "attention" in row:  # only Megatron's tests say it
        practice = MEGATRON_UNFUSED if row["attention"] == "unfused" else MEGATRON_TESTS
        practice = with_slow_samples(practice) if row.get("host") == "one node" else practice
        return with_fused_loss(practice) if row.get("loss") == "fused" else practice
    release = _RELEASE.search(row["source"])
    is_late = release is not None and (int(release[1]), int(release[2])) >= _FEWER_KERNELS
    if is_late and "gb" in row.get("gpu", "").lower():
        return MEGATRON_2026
    practice = next((each for word, each in _BY_SOURCE if word in row["source"]), None) or _usual(row)
    if practice is FOUNDRY and "h100" in row.get("gpu", "").lower():
        return FOUNDRY_HOPPER
    is_zero_3 = row.get("zero_stage", "").startswith("3")
    return DEEPSPEED_2021 if practice is MEGATRON_2021 and is_zero_3 else practice


def _usual(row: Mapping[str, str]) -> Practice:
    device, words = row.get("gpu", "").lower(), f"{row['source']} {row.get('note', '')}".lower()
    if "fsdp" in words:
        return FOUNDRY
    # V100 has no fused attention; fp16 on A100 is of the time before it.
    if "v100" in device or (
        "fp16" in row.get("precision", "") and "flash" not in words and "h100" not in device
    ):
        return MEGATRON_2022 if "SP" in row.get("recompute", "") else MEGATRON_2021
    return MEGATRON
