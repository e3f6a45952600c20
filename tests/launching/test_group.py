from collections.abc import Callable

import pytest
import torch

from echelon.launching import Ranks, launch
from echelon.launching.group import choose_backend, timeout

from . import tasks


@pytest.mark.parametrize(
    ("asked", "devices", "local_ranks", "chosen"),
    [
        (None, 0, 2, "gloo"),
        (None, 2, 2, "nccl"),
        (None, 1, 2, "gloo"),
        ("gloo", 8, 2, "gloo"),
    ],
)
def test_nccl_only_with_a_device_for_every_rank(
    asked: str | None, devices: int, local_ranks: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    assert choose_backend(asked, local_ranks) == chosen


@pytest.mark.parametrize("lengths", [[0, 3, 6], [1024, 1025, 0], [5000, 1, 1024], [0, 0, 0]])
def test_bytes_of_different_length_are_gathered(
    lengths: list[int], warm_ranks: Callable[[int], Ranks]
) -> None:
    expected = [bytes((rank + index) % 251 for index in range(length)) for rank, length in enumerate(lengths)]
    assert warm_ranks(3).run(tasks.gather_bytes, lengths) == [expected] * 3


def test_never_is_a_long_time() -> None:
    assert timeout(None).days >= 365
    assert timeout(2.5).total_seconds() == 2.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_rank_has_a_device_and_more_ranks_share_them() -> None:
    devices = torch.cuda.device_count()
    for ranks, backend in ((devices, "nccl"), (devices + 1, "gloo")):
        results = launch(tasks.use_the_device, ranks)
        assert [result[:2] for result in results] == [(backend, rank % devices) for rank in range(ranks)]
        assert all(total.tolist() == [ranks] * 3 for _, _, total in results)
    assert not torch.cuda.is_initialized(), "the parent needs no memory on a device"
