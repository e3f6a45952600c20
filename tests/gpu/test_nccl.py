"""Every strategy over real NCCL, equal to one device: pytest -m gpu tests/gpu/test_nccl.py"""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.gpu.nccl import PLANS, WarmRanks, works

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def nccl_ranks() -> Iterator[Callable[[int], WarmRanks]]:
    started: dict[int, WarmRanks] = {}
    yield lambda count: started.setdefault(count, WarmRanks(count, "nccl"))
    for ranks in started.values():
        ranks.close()


@pytest.mark.parametrize(
    ("ranks", "plan", "scenario"),
    [(ranks, plan, scenario) for ranks in PLANS for plan, scenario in works(ranks)],
)
def test_plans_are_equal_to_one_device(
    nccl_ranks: Callable[[int], WarmRanks], ranks: int, plan: str, scenario: str
) -> None:
    outcome = nccl_ranks(ranks).verify(plan, scenario)
    assert outcome.result == "equal", outcome.text
