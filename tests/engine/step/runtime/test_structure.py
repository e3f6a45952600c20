"""Structures come back as they were, from a text that another rank can read."""

import math
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from echelon.engine.step.runtime.message import Leaf, Spec
from echelon.errors import UserError

A, B = torch.arange(6.0).view(2, 3), torch.arange(4)


def there_and_back(value: Any) -> Any:
    spec, tensors = Spec.of(value)
    return Spec(spec.text).rebuild(tensors)


@pytest.mark.parametrize(
    "value",
    [
        A,
        (A, B),
        [A, [B, (A,)]],
        {"a": A, "nested": {"b": [B, None]}, 3: A},
        (),
        [],
        {},
        ((), [], {}),
        None,
        (A, None, True, False, 0, -3, 2.5, "text", 'ünïcode ✓ " \\ \n'),
        (math.inf, -math.inf, 1e-320, 2**70),
    ],
)
def test_every_structure_comes_back(value: Any) -> None:
    back = there_and_back(value)
    assert same(back, value), back


def same(value: Any, original: Any) -> bool:
    """Equal in values and types; tensors are the same ones."""
    if isinstance(original, Tensor):
        return value is original
    if type(value) is not type(original):
        return False
    if isinstance(original, dict):
        return list(value) == list(original) and all(same(value[key], original[key]) for key in original)
    if isinstance(original, tuple | list):
        return len(value) == len(original) and all(map(same, value, original))
    return bool(value == original)


def test_a_shape_comes_back_as_a_tuple() -> None:
    assert there_and_back(A.shape) == (2, 3)


def test_not_a_number_comes_back() -> None:
    assert math.isnan(there_and_back((math.nan,))[0])


def test_true_and_one_are_told_apart() -> None:
    assert there_and_back((True, 1, 1.0)) == (True, 1, 1.0)
    assert [type(value) for value in there_and_back((True, 1, 1.0))] == [bool, int, float]
    assert Spec.of(True)[0] != Spec.of(1)[0]
    assert Spec.of((A,))[0] != Spec.of([A])[0]


def test_the_same_tensor_twice_is_two_places() -> None:
    spec, tensors = Spec.of((A, A))
    assert [tensor is A for tensor in tensors] == [True, True]
    assert len(spec.leaves) == 2


def test_tensors_stand_in_the_order_of_the_structure() -> None:
    _, tensors = Spec.of({"z": B, "a": [A, {"inner": B}]})
    assert [tensor is A for tensor in tensors] == [False, True, False]


def test_a_leaf_tells_shape_type_and_whether_it_wants_a_gradient() -> None:
    weights = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    spec, _ = Spec.of((weights, torch.zeros((), dtype=torch.int64), torch.zeros(0, 4).bool()))
    assert spec.leaves == (
        Leaf((2, 3), torch.bfloat16, wants_gradient=True),
        Leaf((), torch.int64, wants_gradient=False),
        Leaf((0, 4), torch.bool, wants_gradient=False),
    )
    assert [leaf.num_bytes for leaf in spec.leaves] == [12, 8, 0]
    assert [leaf.room for leaf in spec.leaves] == [16, 16, 0]


def test_specs_are_equal_when_their_texts_are() -> None:
    first, other = Spec.of((A, B))[0], Spec.of((A + 1, B * 2))[0]
    assert first == other
    assert hash(first) == hash(other)
    assert first != Spec.of((A[:1], B))[0]
    assert first != Spec.of((A.double(), B))[0]
    assert first != Spec.of((A.clone().requires_grad_(), B))[0]


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int8, torch.uint8, torch.bool],
)
def test_every_type_has_a_name_that_is_read_again(dtype: torch.dtype) -> None:
    assert Spec(Spec.of(torch.zeros(1, dtype=dtype))[0].text).leaves[0].dtype == dtype


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Pair(A, B), "Pair"),
        (OrderedDict(a=A), "OrderedDict"),
        (nn.Identity(), "Identity"),
        ({1.5: A}, "dict"),
        ([A, {A}], "set"),
        (b"bytes", "bytes"),
        (1 + 2j, "complex"),
    ],
)
def test_what_another_rank_could_not_rebuild_is_refused(value: Any, kind: str) -> None:
    with pytest.raises(UserError, match=rf"returned a {kind}, which cannot be sent .* in tuples, lists and"):
        Spec.of(value)


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(UserError, match=r"layout torch.sparse_coo, which cannot be sent; .* to_dense"):
        Spec.of([torch.eye(2).to_sparse()])
