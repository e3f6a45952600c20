"""Split layers inside the graphs of torch.compile: the same collectives as outside. Nothing is moved; the
ledger tells."""

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import Ledger, RecordingGroup
from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.nn.wrapping import Wrapping
from echelon.parallel.tensor import entries
from echelon.parallel.tensor.entries import (
    GroupMoves,
    RecordedMoves,
    number_of,
    start_sum,
    start_sum_of_part,
)
from echelon.parallel.tensor.modules import (
    Column,
    EnterFirst,
    Row,
    SplitNorm,
    VocabularyEmbedding,
    prepare_compiling,
)
from echelon.parallel.tensor.regions import Region
from echelon.plan import Plan

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


Warm = Callable[[int], Ranks]
RANKS, SHAPE = 3, (2, 6, 3)


def tensor_of(rank: int) -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def moved(dim: int) -> tuple[Tensor, Tensor, Tensor, bool]:
    """What this rank gathers, sums, and keeps of the sum along `dim`; whether a sum is in place."""
    group = Mesh.join(Plan(tensor=RANKS)).group("tensor")
    x = tensor_of(group.rank)
    here = GroupMoves(group)
    part = here.summed_part(x, dim)
    whole = here.gathered(x, dim)
    total = here.summed(x)
    turned = tensor_of(group.rank).transpose(0, 1)
    assert torch.equal(here.summed(turned), total.transpose(0, 1))  # not contiguous: in new memory
    return whole, total, part, total is x


@pytest.mark.parametrize("dim", [1, 2])
def test_parts_and_sums_are_those_of_all_ranks(warm_ranks: Warm, dim: int) -> None:
    tensors = [tensor_of(rank) for rank in range(RANKS)]
    total = torch.stack(tensors).sum(0)
    for rank, (whole, summed_here, part, in_place) in enumerate(warm_ranks(RANKS).run(moved, dim)):
        assert torch.equal(whole, torch.cat(tensors, dim))
        torch.testing.assert_close(summed_here, total, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(part, total.chunk(RANKS, dim)[rank], rtol=1e-14, atol=1e-14)
        assert in_place


def test_a_sum_can_be_started_and_waited_for() -> None:
    group = RecordingGroup("tensor", 0, 2)
    x = torch.ones(2, 4)
    total, handle = start_sum(x, group)
    handle.wait()
    assert total is x
    part, handle = start_sum_of_part(x, group)
    handle.wait()
    assert part.shape == (2, 2)
    assert [(move.operation, move.subject) for move in group.ledger.moves] == [
        ("all_reduce", "tensor parallelism"),
        ("reduce_scatter", "tensor parallelism"),
    ]


def test_a_sequence_that_ranks_cannot_share_equally_is_refused() -> None:
    with pytest.raises(UserError, match="a sequence of 5 is not divisible by 2; use sequences of a multiple"):
        GroupMoves(RecordingGroup("tensor", 0, 2)).summed_part(torch.ones(2, 5), 1)


# The operators of compiled layers: what torch asks of them, and groups that are gone.


def group() -> RecordingGroup:
    return RecordingGroup("tensor", 0, 2, Ledger())


def test_they_are_what_torch_asks_of_operators() -> None:
    here = group()
    number = number_of(here)
    x = torch.zeros(2, 6, 4)
    torch.library.opcheck(entries.sum_over_ranks, (x, number))
    tests = ("test_schema", "test_faketensor")  # values are not defined: nothing is moved
    for operator in (entries.gather_parts, entries.sum_part_over_ranks):
        torch.library.opcheck(operator, (x, number, 2, 1), test_utils=tests)
        torch.library.opcheck(operator, (x.transpose(0, 1), number, 2, 0), test_utils=tests)
    torch.library.opcheck(entries.checked_tokens, (torch.arange(3), 3))


def test_a_sum_leaves_its_input() -> None:
    here, x = group(), torch.ones(3)
    assert RecordedMoves(number_of(here), 2, 0).summed(x).data_ptr() != x.data_ptr()


def test_a_group_has_one_number_and_numbers_are_not_given_again() -> None:
    first, second = group(), group()
    numbers = [int(number_of(each)) for each in (first, second, first)]
    assert numbers[0] == numbers[2] != numbers[1]
    del first
    gc.collect()
    third = group()
    assert int(number_of(third)) not in numbers
    with pytest.raises(RuntimeError, match="the group of its engine is gone; make a new engine"):
        entries.sum_over_ranks(torch.ones(3), torch.tensor(numbers[0]))


def test_a_part_of_a_sum_must_be_whole() -> None:
    with pytest.raises(UserError, match="a sequence of 5 is not divisible by 2"):
        RecordedMoves(torch.tensor(0), 2, 0).summed_part(torch.ones(2, 5), 1)
