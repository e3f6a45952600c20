"""What a batch may hold."""

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch

from echelon.engine.step.batch_reader import check_batch
from echelon.errors import UserError
from echelon.nn.batch import Inputs

rows = torch.zeros(4, 3)


def errors_of(batch: Any) -> list[str]:
    with pytest.raises(UserError) as refusal:
        check_batch(batch)
    return list(refusal.value.errors)


@pytest.mark.parametrize(
    "batch",
    [
        (rows, rows),
        [rows, rows],
        (rows, None),
        ({"a": rows, "flag": True, "none": None}, [rows, "name", 1, 2.0]),
        (Inputs(rows, rows, scale=2.0), rows),
        (Inputs(rows[:1], [3]), None),
    ],
)
def test_good_batches_pass(batch: Any) -> None:
    check_batch(batch)


def test_every_bad_leaf_is_named() -> None:
    inputs = {"a": torch.tensor(1.0), "b": [rows, np.zeros(3)]}
    errors = errors_of((Inputs(rows, x=inputs), UserDict(labels=rows)))
    assert [error.split(":")[0] for error in errors] == [
        "inputs['x']['a'] is a tensor without dims",
        "inputs['x']['b'][1] is a ndarray",
        "targets is a UserDict, which torch does not look into",
    ]


def test_tensors_that_are_the_same_for_all_samples_are_named() -> None:
    """position_ids of [1, positions] would have been a batch of one sample."""
    (error,) = errors_of((Inputs(input_ids=rows, position_ids=rows[:1]), rows))
    assert "inputs['input_ids'] [4, 3], inputs['position_ids'] [1, 3], targets [4, 3]; expand" in error
    (error,) = errors_of(({"a": 1}, None))
    assert "no tensor at all" in error


@pytest.mark.parametrize("values", [[3, 1, 2, 2], ["a", "b", "c", "d"]])
def test_a_list_with_a_value_per_sample_is_refused(values: list[Any]) -> None:
    """Only tensors are cut: each replica would have got all lengths, and the first ones for its samples."""
    (error,) = errors_of((Inputs(rows, lengths=values), rows))
    assert error.startswith("inputs['lengths'] is a list of 4 values, as many as the batch has samples")
    check_batch((Inputs(rows, sizes=values[:2]), rows))
