"""Which program made a published run: by what its row says of the source."""

from collections.abc import Mapping

from echelon.planner.foresight.practice import (
    DEEPSPEED_2021,
    FOUNDRY,
    FOUNDRY_HOPPER,
    MEGATRON,
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_UNFUSED,
    MLPERF,
    TORCHTITAN,
    Practice,
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


def practice_of(row: Mapping[str, str]) -> Practice:
    """The program that a row is of; one of the time where it does not say."""
    if row.get("attention") == "unfused":
        return MEGATRON_UNFUSED
    for word, practice in _BY_SOURCE:
        if word in row["source"]:
            is_zero = practice is MEGATRON_2021 and row.get("zero_stage", "").startswith("3")
            if practice is FOUNDRY and "h100" in row.get("gpu", "").lower():
                return FOUNDRY_HOPPER
            return DEEPSPEED_2021 if is_zero else practice
    if "fp16" in row.get("precision", "") and row.get("recompute", "") == "full":
        return MEGATRON_2021
    return MEGATRON
