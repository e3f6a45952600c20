"""Split layers inside the graphs of torch.compile: the same collectives as outside. Nothing is moved; the
ledger tells."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import Ledger, RecordingGroup
from echelon.nn.wrapping import Wrapping
from echelon.parallel.tensor.modules import (
    Column,
    EnterFirst,
    Row,
    SplitNorm,
    VocabularyEmbedding,
    prepare_compiling,
)
from echelon.parallel.tensor.regions import Region

Model = tuple[Region, nn.Module]


class Attention(nn.Module):
    """Three columns of the same hidden states, and a row."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(4, 4) for _ in range(4))
        wrapping = Wrapping()
        for column in (self.query, self.key, self.value):
            wrapping.wrap(Column(column, region))
        wrapping.wrap(Row(self.output, region))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(x)
        return self.output(self.query(x) * self.key(x) + self.value(x))  # type: ignore[no-any-return]


def attention(*, sequence: bool) -> Model:
    torch.manual_seed(0)
    region = Region(RecordingGroup("tensor", 0, 2, Ledger()), sequence=sequence)
    return region, Attention(region)


def compiled(model: nn.Module, *, fullgraph: bool = True) -> Callable[[Tensor], Tensor]:
    prepare_compiling(model)
    run: Callable[[Tensor], Tensor] = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    return run


def talk(region: Region, call: Callable[[Tensor], Tensor]) -> list[tuple[str, str]]:
    region.group.ledger.start_step()
    x = torch.randn(2, 6, 4, requires_grad=True)
    call(x).sum().backward()
    return [(move.operation, move.subject) for move in region.group.ledger.moves]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("sequence", [False, True])
def test_a_graph_has_the_collectives_of_the_layer_in_their_order(*, sequence: bool) -> None:
    """Query, key and value share one entry there too: otherwise they sum their gradients one by one."""
    region, model = attention(sequence=sequence)
    expected = talk(region, model)
    assert len(expected) == (4 if sequence else 2)
    call = compiled(model)
    assert talk(region, call) == expected
    assert talk(region, call) == expected  # replayed


class Layer(nn.Module):
    """Its attention has a region of its own: what this is given enters before it, and nothing enters again.

    `breaks`: between query and key is what torch cannot record.
    """

    def __init__(self, region: Region, *, breaks: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(4), Broken(region) if breaks else Whole(region)
        wrapping, enter = Wrapping(), EnterFirst(region)
        wrapping.before("tensor", self.attention, enter, with_kwargs=True)
        wrapping.after("tensor", self.attention, enter.after)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x=self.norm(x))  # type: ignore[no-any-return]


class Whole(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.query(x) * self.key(x) + self.value(x))  # type: ignore[no-any-return]


class Broken(Attention):
    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        torch._dynamo.graph_break()
        return self.output(query * self.key(x) + self.value(x))  # type: ignore[no-any-return]


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at inputs of later graphs
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("breaks", [False, True])
def test_what_has_entered_before_a_module_does_not_enter_again_inside_of_it(
    *, sequence: bool, breaks: bool
) -> None:
    """Whether or not what it was made of is still there, and in whichever graph it is used."""
    torch.manual_seed(0)
    region = Region(RecordingGroup("tensor", 0, 2, Ledger()), sequence=sequence)
    model = Layer(region, breaks=breaks)
    expected = talk(region, model)
    assert len(expected) == (4 if sequence else 2)
    assert talk(region, compiled(model, fullgraph=not breaks)) == expected
    assert region.entered is None


def test_engines_share_compiled_code_and_not_their_groups() -> None:
    """torch guards no function that it puts into a graph: the second engine called one of the first."""
    (one, first), (other, second) = attention(sequence=False), attention(sequence=False)
    assert len(talk(one, compiled(first))) == 2
    torch._dynamo.utils.counters.clear()
    one.group.ledger.start_step()
    assert len(talk(other, compiled(second))) == 2
    assert one.group.ledger.moves == []
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def test_a_layer_of_a_copy_is_compiled_for_the_copy() -> None:
    region, model = attention(sequence=False)
    compiled(model)
    other = copy.deepcopy(region)
    assert region._recorded_group is not None
    assert other._recorded_group is None


def embedding() -> Model:
    region = Region(RecordingGroup("tensor", 0, 2, Ledger()), sequence=False)
    module = nn.Embedding(8, 4)
    Wrapping().wrap(VocabularyEmbedding(module, region))
    return region, module


def test_tokens_are_checked_inside_a_graph() -> None:
    region, model = embedding()
    call = compiled(model)
    call(torch.tensor([[0, 3, 7]]))
    assert [move.operation for move in region.group.ledger.moves] == ["all_reduce"]
    with pytest.raises(IndexError, match="tokens 0 … 8 of a vocabulary of 8"):
        call(torch.tensor([[0, 3, 8]]))


@pytest.mark.parametrize("joined", [False, True])
def test_padded_logits_inside_a_graph(*, joined: bool) -> None:
    """The vocabulary is 7, and this rank, the last, has 4 columns of 8."""
    region = Region(RecordingGroup("tensor", 1, 2, Ledger()), sequence=False)
    module = nn.Linear(4, 4)
    Wrapping().wrap(Column(module, region, joined=joined, vocabulary=7))
    x = torch.randn(2, 6, 4)
    expected, logits = module(x), compiled(module)(x)
    assert logits.shape[-1] == (7 if joined else 4)
    assert joined or bool(logits[..., -1].isneginf().all())
    if not joined:
        torch.testing.assert_close(logits, expected)


class Normed(nn.Module):
    """A column, a norm over the features of all ranks, and a row."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        wrapping = Wrapping()
        for wrapper in (Column(self.up, region), SplitNorm(self.norm, region), Row(self.down, region)):
            wrapping.wrap(wrapper)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(torch.sin(x))))  # type: ignore[no-any-return]


def test_a_norm_over_split_features_adds_up_its_sums_in_both_passes() -> None:
    region = Region(RecordingGroup("tensor", 0, 2, Ledger()), sequence=False)
    model = Normed(region)
    expected = talk(region, model)
    assert len(expected) == 2 + 4  # mean and variance, forward and backward
    assert talk(region, compiled(model)) == expected
