"""For all tests of pipelines: the reference of a contract test computes here, beside ranks that fill the
cores. Its tensors are tiny, and threads that wait for each other cost it four times its time."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
