import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from echelon.errors import UserError
from echelon.launching import RemoteResult

USES: dict[str, Callable[[Any], object]] = {
    "truth": bool,
    "equal": lambda remote: remote == RemoteResult(2),
    "not equal": lambda remote: remote != 1,
    "less": lambda remote: remote < 1.0,
    "the largest": lambda remote: max(0.5, remote),
    "index": lambda remote: remote[0],
    "key": lambda remote: remote["loss"],
    "as an index": lambda remote: [1, 2, 3][remote],
    "loop": list,
    "unpack": lambda remote: [*remote],
    "membership": lambda remote: 1 in remote,
    "in a list": lambda remote: remote in [1],
    "length": len,
    "hash": lambda remote: {remote: 1},
    "float": float,
    "int": int,
    "sum": lambda remote: sum([remote]),
    "product": lambda remote: remote * 2,
    "negative": operator.neg,
    "call": lambda remote: remote(),
    "format": lambda remote: f"{remote:.3f}",
    "numpy scalar": lambda remote: np.float64(1.0) + remote,
    "numpy array": lambda remote: np.ones(2) * remote,
    "to numpy": np.asarray,
    "tensor": lambda remote: torch.ones(2) + remote,
    "to a tensor": torch.tensor,
}


@pytest.mark.parametrize("use", USES)
def test_every_use_says_which_ranks_have_the_result(use: str) -> None:
    with pytest.raises(UserError, match=r"only rank 0 and rank 2 have it: use it on rank 0 \(if torch"):
        USES[use](RemoteResult(2))


def test_an_attribute_says_it_too() -> None:
    with pytest.raises(AttributeError, match=r"only rank 0 and rank 2 have it: .* \(asked for \.loss\)"):
        _ = RemoteResult(2).loss
    assert not hasattr(RemoteResult(2), "loss")


def test_it_can_be_printed_and_copied() -> None:
    text = "<the result of rank 2: not on this rank>"
    assert repr([RemoteResult(2)]) == f"[{text}]"
    for copied in (copy.copy(RemoteResult(2)), pickle.loads(pickle.dumps(RemoteResult(2)))):
        assert f"{copied}" == text
