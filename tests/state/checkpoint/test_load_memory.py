"""A rank reads the bytes that it needs, and holds one tensor beside its own state."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.engine import parallelize
from echelon.launching import Ranks
from echelon.state.checkpoint.saved import SavedState
from tests.peak_memory import PeakMemory

PLAN = "data=2 zero=3 precision=fp32"
WIDTH, LAYERS = 128, 6
LARGEST = WIDTH * WIDTH * 4  # bytes of one matrix


def make_engine(plan: str) -> Any:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    make = lambda p: torch.optim.AdamW(p, lr=1e-2)  # noqa: E731
    return parallelize(model, plan, optimizer=make, loss=F.mse_loss, audit="off")


def save(path: str) -> None:
    engine = make_engine(PLAN)
    engine.step(engine.local((torch.ones(2, WIDTH), torch.zeros(2, WIDTH))))
    engine.save(path)
    engine.close(restore=False)


def load(path: str) -> tuple[int, int, int]:
    """The bytes of this rank's state; those that a load has read; the most that it has taken at a time."""
    engine = make_engine(PLAN)
    read, num_read = SavedState.read, 0

    def counted(self: SavedState, box: Any, out: Tensor) -> None:
        nonlocal num_read
        num_read += box.numel * self.parts(box.name)[box.part].dtype.itemsize
        read(self, box, out)

    with pytest.MonkeyPatch.context() as patch, PeakMemory() as memory:
        patch.setattr(SavedState, "read", counted)
        engine.load(path, verify=False)
    own = sum(each.tensor.nbytes for each in engine.owned())
    engine.close(restore=False)
    return own, num_read, memory.peak


def test_a_rank_reads_its_own_bytes_and_holds_one_tensor_more(
    warm_ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    path = str(tmp_path / "a")
    warm_ranks(2).run(save, path)
    whole = 3 * LAYERS * LARGEST  # weights and two moments
    for own, read, peak in warm_ranks(2).run(load, path):
        assert own < 0.6 * whole
        assert 0.98 * own < read < 1.02 * own
        assert peak <= own + LARGEST
