"""Every way to hold and agree, on every number of ranks, for every model: long, run by `make fuzz`."""

import dataclasses
import itertools

import pytest

from echelon.verify import assert_equal
from tests.contract_models import CASES

SYNCS = ["zero=0", "zero=1", "zero=2", "zero=3", "sync=parameter-server", "sync=async staleness=0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sync", "ranks", "microbatches"), list(itertools.product(CASES, SYNCS, (2, 3, 4, 8), (1, 3)))
)
def test_equal_to_one_device(name: str, sync: str, ranks: int, microbatches: int) -> None:
    case = dataclasses.replace(CASES[name], options={"smallest_unit": 0})
    verdict = assert_equal(case, f"data={ranks} microbatches={microbatches} {sync}")
    print(f"{verdict.worst[1]:.1e} {name} {verdict.plan}")
