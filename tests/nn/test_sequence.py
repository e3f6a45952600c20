"""Views: all positions on one rank, and how layers get another view."""

import torch
from torch import Tensor, nn

from echelon.nn.sequence import POSITIONS, WHOLE, View, assign, document_mask
from echelon.nn.wrapping import Wrapping


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.view = WHOLE


class Picture(nn.Module):
    """Has an attribute of the same name that is something else."""

    def __init__(self) -> None:
        super().__init__()
        self.view = "front"


def test_the_whole_sequence_is_in_order() -> None:
    assert WHOLE.positions(4, torch.device("cpu")).tolist() == [0, 1, 2, 3]
    assert (WHOLE.parts, WHOLE.stretch, WHOLE.whole_length(4)) == (1, 1, 4)


def test_padding_is_at_the_last_position() -> None:
    view = View()
    view.true_length = 3
    assert view.positions(5, torch.device("cpu")).tolist() == [0, 1, 2, 2, 2]
    assert [view.whole_length(length) for length in (2, 3, 5)] == [2, 3, 3]


def plain_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ value


def test_attention_is_causal_and_heads_may_share_keys() -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    for kv_heads in (4, 2, 1):
        key, value = torch.randn(2, 2, kv_heads, 5, 8, dtype=torch.float64)
        for scale, factor in ((None, 8**-0.5), (0.3, 0.3)):
            expected = plain_attention(query, key, value, factor)
            torch.testing.assert_close(WHOLE.attend(query, key, value, scale), expected)


def test_every_layer_that_has_a_view_gets_the_new_one() -> None:
    model = nn.Sequential(Attention(), nn.Sequential(Attention(), nn.Linear(2, 2)), Picture())
    view, wrapping = View(), Wrapping()
    assert assign(model, view, wrapping) == 2
    assert model[0].view is view
    assert model[1][0].view is view
    assert model[2].view == "front"
    assert not hasattr(model[1][1], "view")
    wrapping.remove()
    assert model[0].view is model[1][0].view is WHOLE


def test_packed_documents_do_not_attend_to_each_other() -> None:
    mask = document_mask(torch.tensor([[0, 1, 2, 0, 1]]))
    assert mask.int().tolist() == [
        [[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]]
    ]


def test_packed_attention_is_that_of_each_document() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 5, 4, dtype=torch.float64) for heads in (4, 2, 2))
    packed = WHOLE.attend_packed(query, key, value, torch.tensor([[0, 1, 2, 0, 1]]))
    parts = [WHOLE.attend(*(x[:, :, part] for x in (query, key, value))) for part in (slice(3), slice(3, 5))]
    torch.testing.assert_close(packed, torch.cat(parts, dim=2))


def test_layers_find_the_positions_that_all_share() -> None:
    view = View()
    assert view.packed_positions(3) is None
    with view.seeing(None, {POSITIONS: torch.tensor([[0, 1]])}):
        positions = view.packed_positions(3)
    assert positions is not None
    assert positions.tolist() == [[0, 1, 1]]
