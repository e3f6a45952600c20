"""Whole models that see a part of the sequence on each rank, against one that sees it all."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from echelon.collectives import Group, RecordingGroup
from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import ModelConfig, build, cross_entropy
from echelon.nn import sequence
from echelon.nn.wrapping import Wrapping
from echelon.parallel.context import AllToAllView, RingView, SharedView, take
from echelon.plan import Plan

CONFIGS = {
    "gpt": ModelConfig("gpt", layers=2, width=24, heads=2, vocab=17, sequence=24, tied=True),
    "llama": ModelConfig("llama", layers=2, width=32, heads=4, kv_heads=2, ffn=40, vocab=17, sequence=24),
}
LENGTH = 24


View = type[SharedView]


def trained(config: ModelConfig, group: Group | None, view: View = RingView) -> list[Tensor]:
    """Loss, count and gradients of what `group` leaves to this rank, or of the whole."""
    torch.manual_seed(0)
    model = build(config).double()
    batch = torch.randint(config.vocab, (2, 3, LENGTH), generator=torch.Generator().manual_seed(1))
    if group is not None:
        assert sequence.assign(model, view(group), Wrapping()) >= config.layers
        batch = take(batch, group.rank, group.size, dim=2)
    tokens, targets = batch
    total, count = cross_entropy(model(tokens), targets)
    total.backward()
    return [total.detach(), count, *(p.grad for p in model.parameters() if p.grad is not None)]


def trained_on_a_part(config: ModelConfig, ranks: int, view: View) -> list[Tensor]:
    return trained(config, Mesh.join(Plan(context=ranks)).group("context"), view)


@pytest.mark.parametrize(("view", "ranks"), [*((RingView, n) for n in (2, 3, 4)), (AllToAllView, 2)])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_ranks_add_up_to_the_whole(
    warm_ranks: Callable[[int], Ranks], config: ModelConfig, ranks: int, view: View
) -> None:
    wanted = trained(config, None)
    by_rank = warm_ranks(ranks).run(trained_on_a_part, config, ranks, view)
    summed = [sum(parts[1:], parts[0]) for parts in zip(*by_rank, strict=True)]
    assert len(summed) == len(wanted)
    assert max(float((x - y).abs().max()) for x, y in zip(summed, wanted, strict=True)) <= 1e-10


def test_a_view_says_where_its_positions_are() -> None:
    view = RingView(RecordingGroup("context", rank=1, size=2))
    assert view.parts == 2
    assert view.positions(4, torch.device("cpu")).tolist() == [2, 3, 4, 5]


def test_padding_has_the_last_position_of_the_sequence() -> None:
    view = RingView(RecordingGroup("context", rank=0, size=2))
    view.true_length = 6
    assert view.positions(4, torch.device("cpu")).tolist() == [0, 1, 5, 5]
    assert (view.whole_length(4), view.whole_length(2)) == (6, 4)


def test_a_gpt_counts_the_positions_of_all_ranks() -> None:
    model = build(CONFIGS["gpt"])
    sequence.assign(model, RingView(RecordingGroup("context", rank=0, size=2)), Wrapping())
    with pytest.raises(UserError, match="a sequence of 28 tokens: this GPT has learned 24 positions"):
        model(torch.zeros(1, 14, dtype=torch.int64))


def test_a_view_attends_with_the_scale_that_it_is_given() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64)
    view = RingView(RecordingGroup("context"))
    for scale in (None, 1.7):
        wanted = sequence.WHOLE.attend(query, key, value, scale)
        torch.testing.assert_close(view.attend(query, key, value, scale), wanted, rtol=0, atol=1e-13)
