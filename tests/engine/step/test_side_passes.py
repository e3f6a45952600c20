"""The batches that add up to one update: none comes after the one that was said to be the last."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import echelon
from echelon import UserError


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_no_batch_follows_the_last_one() -> None:
    batch = torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)
    with echelon.parallelize(nn.Linear(3, 2), "data=1", optimizer=sgd, loss=F.cross_entropy) as engine:
        output = engine(batch[0])
        engine.forward_backward(batch, last=True)
        for call in (
            lambda: engine.forward_backward(batch),
            lambda: engine.backward(F.cross_entropy(output, batch[1])),
        ):
            with pytest.raises(UserError, match="summed over ranks already"):
                call()
        engine.update()  # which they have not changed


def test_a_refused_batch_drops_its_update() -> None:
    batch = torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)
    with echelon.parallelize(nn.Linear(3, 2), "data=1", optimizer=sgd, loss=F.cross_entropy) as engine:
        engine.forward_backward(batch)
        with pytest.raises(ZeroDivisionError):
            engine.forward_backward(batch, lambda *_: 1 / 0)
        with pytest.raises(UserError, match="no gradients wait"):
            engine.update()
        engine.step(batch)
