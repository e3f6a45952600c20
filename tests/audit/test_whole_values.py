"""Values that ranks hold in parts: put together and taken apart again, with and without padding."""

from itertools import product

import pytest
import torch
from torch import Tensor

from echelon.audit import whole_values
from echelon.audit.whole_values import Division, ValueGroups, cut
from echelon.collectives import Group, RecordingGroup

RANKS = 2


def groups_of(context: int, tensor: int, vocabulary: int | None = None) -> ValueGroups:
    return ValueGroups(
        RecordingGroup("context", context, RANKS), RecordingGroup("tensor", tensor, RANKS), True, vocabulary
    )


@pytest.mark.parametrize(
    ("division", "length"),
    [
        (Division(), 8),
        (Division(by_context=True), 8),
        (Division(by_context=True), 6),  # padded to 8
        (Division(by_sequence=True), 7),
        (Division(by_context=True, by_sequence=True), 8),
    ],
)
def test_parts_make_the_whole(division: Division, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(3, length, 2)
    local_length = 8 // (RANKS if division.by_context else 1) // (RANKS if division.by_sequence else 1)
    like = torch.empty(3, local_length, 2)
    parts = {
        place: groups_of(*place).take(whole, division, like) for place in product(range(RANKS), repeat=2)
    }

    def gather_rows(_: Tensor, group: Group) -> Tensor:
        if group.axis == "tensor":
            return torch.stack([parts[0, tensor] for tensor in range(RANKS)])
        if not division.by_sequence:
            return torch.stack([parts[context, 0] for context in range(RANKS)])
        rows = [torch.cat([parts[context, tensor] for tensor in range(RANKS)], 1) for context in range(RANKS)]
        return torch.stack(rows)

    monkeypatch.setattr(whole_values, "gather_rows", gather_rows)
    joined = groups_of(0, 0).join(parts[0, 0], division)
    assert torch.equal(cut(joined, whole), whole)
    assert not joined[:, length:].any()


def test_logits_are_divided_by_vocabulary_and_padded() -> None:
    whole, like = torch.randn(2, 4, 5), torch.empty(2, 4, 3)
    division = Division(by_vocabulary=True)
    first, second = (groups_of(0, rank, 5).take(whole, division, like) for rank in range(RANKS))
    assert torch.equal(torch.cat([first, second], -1)[..., :5], whole)
    assert not second[..., 2:].any()


@pytest.mark.parametrize(
    ("local", "whole", "expected"),
    [
        ((2, 4, 6), (2, 8, 6), Division(by_context=True)),
        ((2, 2, 6), (2, 8, 6), Division(by_context=True, by_sequence=True)),
        ((2, 2, 6), (2, 7, 6), Division(by_context=True, by_sequence=True)),
        ((2, 4, 3), (2, 8, 5), Division(by_context=True, by_vocabulary=True)),
        ((2, 4, 3), (2, 8, 6), None),  # a column alone
        ((2, 1, 6), (2, 8, 6), None),  # a part of a part
        ((4, 4, 6), (2, 8, 6), None),
        ((2, 4), (2, 8, 6), None),
        ((6,), (6,), Division()),
    ],
)
def test_shapes_tell_how_an_output_is_divided(
    local: tuple[int, ...], whole: tuple[int, ...], expected: Division | None
) -> None:
    values = groups_of(0, 0, vocabulary=5)
    assert values.division_of_output(torch.empty(local), torch.empty(whole)) == expected


def test_the_first_layer_sees_all_that_its_context_rank_has() -> None:
    values, tokens = groups_of(0, 0), torch.empty(2, 4)
    assert values.division_of_input(tokens, is_first=True) == Division(by_context=True)
    assert values.division_of_input(tokens, is_first=False) == Division(by_context=True, by_sequence=True)
    assert values.division_of_input(torch.empty(2), is_first=False) == Division()
