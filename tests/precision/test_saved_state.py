"""State from a checkpoint, of ranks that have no element of a parameter."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon import parallelize
from echelon.checkpoint import SavedParameter
from echelon.checkpoint.saved import SavedState
from echelon.optim import SM3, Adafactor, CombinedOptimizer
from echelon.optim.exchange import Box, Exchange, Part, whole_box
from echelon.precision.saved_state import load_state

SUMS = [partial(SM3, lr=0.1), partial(Adafactor, lr=0.1)]
SHAPE = (2, 3)


def save_after_a_step(path: Path, make: Any) -> SavedState:
    model = nn.Linear(3, 2, bias=False)
    with parallelize(model, "precision=fp32", optimizer=make, loss=F.mse_loss, audit="off") as engine:
        engine.step((torch.ones(4, 3), torch.zeros(4, 2)))
        engine.save(path)
    return SavedState.open(path)


def load(optimizer: Any, tensor: nn.Parameter, saved: SavedState) -> dict[str, Tensor]:
    of_rank = SavedParameter(saved, "weight", lambda _: [])
    load_state(optimizer, tensor, (1,), of_rank, optimizer.whole_state)
    state: dict[str, Tensor] = optimizer.state.get(tensor, {})
    return state


def exchange_of(tensor: nn.Parameter, boxes: list[Box]) -> Exchange:
    return Exchange([SHAPE], {tensor: Part(0, boxes, lambda _: [])}, (), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("make", SUMS)
@pytest.mark.parametrize("combined", [False, True])
def test_a_rank_with_padding_alone_has_no_statistics(make: Any, combined: bool, tmp_path: Path) -> None:
    """No update would change them there: they would be older than those of other ranks."""
    saved = save_after_a_step(tmp_path / "saved", make)
    for boxes, has_state in (([], False), ([whole_box(SHAPE)], True)):
        padding = nn.Parameter(torch.zeros(4))
        made = make([padding])
        optimizer = CombinedOptimizer([made]) if combined else made
        optimizer.share(exchange_of(padding, boxes))
        assert bool(load(optimizer, padding, saved)) is has_state


def test_a_rank_with_padding_alone_counts_steps_of_elementwise_optimizers(tmp_path: Path) -> None:
    """They update padding too."""
    saved = save_after_a_step(tmp_path / "saved", torch.optim.AdamW)
    padding = nn.Parameter(torch.zeros(4))
    combined = CombinedOptimizer([torch.optim.AdamW([padding]), SM3([nn.Parameter(torch.ones(1))])])
    combined.share(exchange_of(padding, []))
    assert load(combined, padding, saved)["step"] == 1
