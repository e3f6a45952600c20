"""What recompute=selective computes again is cheap where it was measured."""

import json
from pathlib import Path

import pytest

from benchmarks import selective_costs
from echelon.memory.recompute import selective_operations
from echelon.memory.recompute.selective_operations import MOST_PASSES

_FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "selective-costs.json"
_KEPT = {"attention", "linear, rows of 6400"}
_BY_LENGTH = {"linear, rows of 1600"}  # the time of a product depends on its rows
_SLOW_MASKS = {("cpu", "keyed dropout")}  # they take long to draw on a CPU, and are not kept all the same


def measured() -> list[tuple[str, str, float]]:
    rows = json.loads(_FILE.read_text())["rows"]
    assert rows
    return [(row["case"], row["contender"], row["extras"]["passes_count"]) for row in rows]


def test_every_operation_is_measured() -> None:
    _, rows = selective_costs.bench(quick=True)
    names = {operation.name for operation in selective_costs.operations("cpu")}
    assert len(rows) >= len(names)
    assert names == {name for case, name, _ in measured() if case == "cpu"}


@pytest.mark.parametrize("device", sorted({device for device, _, _ in measured()}))
def test_the_classification_is_what_was_measured(device: str) -> None:
    here = [row for row in measured() if row[0] == device and row[:2] not in _SLOW_MASKS]
    cheap = {name: passes for _, name, passes in here if name not in _KEPT | _BY_LENGTH}
    kept = {name: passes for _, name, passes in here if name in _KEPT}
    assert all(passes < MOST_PASSES for passes in cheap.values()), cheap
    assert all(passes > max(cheap.values()) for passes in kept.values()), kept


@pytest.mark.parametrize("device", sorted({device for device, _, _ in measured()}))
def test_the_cost_of_a_product_is_about_what_was_measured(device: str) -> None:
    tables = {
        "cpu": selective_operations._BYTES_PER_FLOP["cpu"] / 4,
        "cuda": selective_operations._BYTES_PER_FLOP_16_BIT["cuda"] / 2,
    }
    for case, name, passes in measured():
        if case == device and name.startswith("linear"):
            expected = 2 * int(name.split()[-1]) * tables[device]
            assert expected / 4 < passes < expected * 4
