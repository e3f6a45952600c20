"""The bench of memory by category, with a small model on warm ranks."""

from collections.abc import Callable

import pytest

from benchmarks import memory_settings
from echelon.launching import Ranks
from echelon.plan import Plan


@pytest.mark.slow
def test_every_setting_is_measured_beside_the_plain_plan(warm_ranks: Callable[[int], Ranks]) -> None:
    chosen = [each for each in memory_settings.SETTINGS if Plan.parse(each.plan).ranks == 1]
    (measured,) = warm_ranks(1).run(memory_settings.measure, chosen, memory_settings._SMALL, 1)
    peaks = {name: memory_settings._peaks([measured], name) for name in measured.seconds}
    plain = peaks["precision=bf16"]
    assert peaks["precision=bf16 recompute=full"]["activations_bytes"] < 0.7 * plain["activations_bytes"]
    assert peaks["precision=bf16 recompute=selective"]["activations_bytes"] < plain["activations_bytes"]
    assert peaks["precision=bf16 update=backward"]["gradients_bytes"] < plain["gradients_bytes"]
    assert peaks["precision=bf16, Adafactor"]["optimizer_bytes"] < 0.5 * plain["optimizer_bytes"]
    smallest = peaks["precision=bf16 recompute=full update=backward masters=false, Adafactor"]
    assert sum(smallest.values()) == min(sum(each.values()) for each in peaks.values())
    assert all(len(seconds) == 1 for seconds in measured.seconds.values())


def test_ten_settings_and_the_plain_plan_of_two_ranks_are_compared() -> None:
    assert len(memory_settings.SETTINGS) == 11
    assert len({each.name for each in memory_settings.SETTINGS}) == 11
