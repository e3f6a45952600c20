"""Factor and skip flag of an update, as the thread that updates reads them."""

from typing import Any

import pytest
import torch

from echelon.update.offload.optimizer import HostNumbers


@pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25), torch.tensor([0.25], dtype=torch.float64)])
@pytest.mark.parametrize("skip", [False, True, torch.tensor(True), torch.tensor(0.0)])
def test_numbers_of_the_host_are_read_as_they_are(factor: Any, skip: Any) -> None:
    found = HostNumbers(factor, skip).read()
    assert found == (0.25, bool(skip))
    assert (type(found[0]), type(found[1])) == (float, bool)
