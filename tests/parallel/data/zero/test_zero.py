"""ZeRO in one process: what is on the way, and what has memory.

The group is one whose operations take effect when they are waited for.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.collectives import Ledger, RecordingGroup
from echelon.collectives.boundary import PretendedBoundary
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.parameter_set import ShardGroups
from echelon.parallel.data.zero.host_weights import HostPlace
from echelon.parallel.data.zero.zero import Zero
from tests.cases import mean_loss, vectors
from tests.groups import DeferredGroup
from tests.sets import set_of

pytestmark = pytest.mark.usefixtures("packed")


def ones(layers: int = 5) -> nn.Sequential:
    """Layers of two features each, all weights 1."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(layers)))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


def run_microbatch(sharing: Zero, model: nn.Module, *, last: bool = True) -> None:
    total = model(torch.ones(1, 2)).sum()
    sharing.start_backward(last=last)
    total.backward()
    sharing.finish_backward()


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_at_most_two_whole_gradients_are_there_at_once(level: int, microbatches: int) -> None:
    """One on its way, while the next is produced; counted from storages."""
    group, model = DeferredGroup(), ones()
    sharing = Zero(set_of(model, group), level, Wrapping())
    on_the_way: list[int] = []
    produced: list[int] = []

    def note(_: object) -> None:
        on_the_way.append(sum(not storage.expired() for storage in group.reduced))
        produced.append(sum(flat.gradient.buffer is not None for flat in sharing._flats))

    for parameter in model.parameters():
        parameter.register_hook(note)
    for _ in range(2):
        sharing.start_step()
        for index in range(microbatches):
            run_microbatch(sharing, model, last=index == microbatches - 1)
        sharing.reduce()
        assert not group.pending
        assert all(storage.expired() for storage in group.reduced), "and none after the step"
        sharing.publish()
    assert len(group.reduced) == 2 * microbatches * len(model)
    assert set(on_the_way) == {0, 1}, "more would be memory, fewer would be waiting"
    assert on_the_way.count(0) == 2, "only the first of a step has none before it"
    assert set(produced) == {0}, "a unit has memory for its gradient when that comes, and not before"


def test_at_level_1_whole_gradients_stay_and_all_may_be_on_the_way() -> None:
    group, model = DeferredGroup(), ones()
    sharing = Zero(set_of(model, group), 1, Wrapping())
    sharing.start_step()
    run_microbatch(sharing, model, last=False)
    assert group.pending == [], "earlier microbatches only add up"
    run_microbatch(sharing, model)
    assert len(group.pending) == len(model)
    sharing.reduce()
    assert group.pending == []


@pytest.mark.parametrize("level", [1, 2, 3])
def test_the_gradient_of_a_part_is_the_sum_over_ranks_and_microbatches(level: int) -> None:
    group, model = DeferredGroup(rank=1), ones(2)
    sharing = Zero(set_of(model, group), level, Wrapping())
    for _ in range(2):  # steps
        sharing.start_step()
        for last in (False, False, True):
            run_microbatch(sharing, model, last=last)
        sharing.reduce()
        gradients = {local.name: local.tensor.grad for local in sharing.local_parameters()}
        assert {name: g.tolist() for name, g in gradients.items() if g is not None} == {
            "0.weight": [12.0, 12.0],  # 3 microbatches, 2 ranks, of 2 each
            "1.weight": [12.0, 12.0],
        }


def hybrid(level: int, model: nn.Module, copy: int = 0) -> tuple[Zero, DeferredGroup]:
    """The second of two ranks that shard one of three copies; and the group of all six."""
    group = DeferredGroup(rank=2 * copy + 1, size=6)
    shard, copies = DeferredGroup("shard", rank=1), DeferredGroup("copies", rank=copy, size=3)
    shard.ledger = copies.ledger = group.ledger
    return Zero(set_of(model, group, shards=ShardGroups(shard, copies)), level, Wrapping()), group


@pytest.mark.parametrize("level", [1, 2, 3])
def test_in_groups_parts_are_of_the_group_and_sums_of_all_ranks(level: int) -> None:
    model = ones(2)
    sharing, _ = hybrid(level, model)
    for _ in range(2):  # steps
        sharing.start_step()
        for last in (False, False, True):
            run_microbatch(sharing, model, last=last)
        sharing.reduce()
        assert [local.begin for local in sharing.local_parameters()] == [2, 2], "the second half of each"
        for local in sharing.local_parameters():
            assert local.tensor.grad is not None
            assert local.tensor.grad.tolist() == [36.0, 36.0]  # 3 microbatches, 6 ranks, of 2 each


@pytest.mark.parametrize("level", [1, 2, 3])
def test_only_parts_move_inside_a_group_and_replicas_agree_all_together(level: int) -> None:
    model = ones(2)
    sharing, group = hybrid(level, model)
    sharing.start_step()
    run_microbatch(sharing, model)
    sharing.reduce()
    sharing.publish()
    moved = {(move.subject, move.operation): move.axis for move in group.ledger.moves}
    assert moved == {
        ("gradients", "reduce_scatter"): "shard",
        ("gradients", "all_reduce"): "copies",
        ("parameters", "all_gather"): "shard",
        ("agreement", "all_reduce"): "shard" if level == 3 else "data",  # on what was gathered; on the units
        ("used parameters", "all_reduce"): "data",
        ("order", "broadcast"): "data",
    }


def test_in_groups_each_gradient_is_counted_once_in_the_norm() -> None:
    """Three ranks hold the same part: their pieces together are all of it."""
    pieces: dict[int, list[float]] = {}
    for copy in range(3):
        sharing, _ = hybrid(1, nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 1, bias=False)), copy)
        for local in sharing.local_parameters():
            local.tensor.grad = torch.arange(local.tensor.numel()) + 100.0 * local.begin
        share = sharing.norm_share()
        assert all(piece.numel() for piece in share)
        pieces[copy] = torch.cat(share).tolist()
    whole = torch.cat([torch.as_tensor(local.tensor.grad) for local in sharing.local_parameters()]).tolist()
    assert sorted(pieces[0] + pieces[1] + pieces[2]) == sorted(whole)
    assert all(pieces.values())


@pytest.mark.parametrize("level", [1, 2])
def test_new_weights_are_everywhere_when_publish_returns(level: int) -> None:
    group, model = DeferredGroup(), ones(2)
    sharing = Zero(set_of(model, group), level, Wrapping())
    sharing.start_step()
    run_microbatch(sharing, model)
    sharing.reduce()
    with torch.no_grad():
        for local in sharing.local_parameters():
            local.tensor.fill_(5.0)
    sharing.publish()
    assert group.pending == []
    assert [parameter.tolist() for parameter in model.parameters()] == [[[5.0, 5.0], [5.0, 5.0]]] * 2


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("level", [1, 2])
def test_weights_are_shared_in_the_order_of_their_updates(level: int, in_backward: bool) -> None:
    """A host updates them in the order of the next forward, or in that of the backward pass: to wait for the
    last one first would hide nothing of the messages behind the others."""
    group, model, shared = DeferredGroup(), ones(3), list[str]()
    sharing = Zero(set_of(model, group), level, Wrapping(), in_backward=in_backward)
    sharing.update_in_backward(lambda _: None)
    sharing.expect_weights(lambda local: shared.extend(each.name for each in local))
    sharing.start_step()
    run_microbatch(sharing, model)
    sharing.reduce()
    sharing.publish()
    names = [name for name, _ in model.named_parameters()]
    assert shared == (names[::-1] if in_backward else names)


def test_at_level_3_the_next_step_gathers_the_new_weights() -> None:
    """What was gathered ahead and not used holds the weights of before."""
    group, model = DeferredGroup(), ones(2)
    sharing = Zero(set_of(model, group), 3, Wrapping())
    sharing.start_step()
    run_microbatch(sharing, model)
    sharing.reduce()
    sharing.gather(backward=False)
    with torch.no_grad():
        for local in sharing.local_parameters():
            local.tensor.fill_(5.0)
    sharing.publish()
    with torch.no_grad():
        assert model(torch.ones(1, 2)).tolist() == [[100.0, 100.0]]


def test_a_step_that_failed_leaves_nothing_on_the_way_and_nothing_in_its_sums() -> None:
    for level in (1, 2, 3):
        group, model = DeferredGroup(), ones(3)
        sharing = Zero(set_of(model, group), level, Wrapping())
        sharing.start_step()
        total = model(torch.ones(1, 2)).sum()
        sharing.start_backward(last=True)
        total.backward()  # and the step ends here
        assert group.pending
        sharing.start_step()
        assert group.pending == []
        run_microbatch(sharing, model)
        sharing.reduce()
        first = sharing.local_parameters()[0].tensor.grad
        assert first is not None
        assert first.tolist() == [8.0, 8.0], level


def test_a_closed_strategy_leaves_no_hooks_on_parameters() -> None:
    for level in (1, 2, 3):
        model, wrapping = ones(2), Wrapping()
        sharing = Zero(set_of(model, DeferredGroup()), level, wrapping)
        sharing.close()
        wrapping.remove()
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
        assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model)


class HidesItsOutput(nn.Module):
    """Returns a function: no hook can see the tensor in it, so nobody learns of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Callable[[], Tensor]:
        hidden = torch.tanh(self.layer(x))
        return lambda: hidden


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = HidesItsOutput(), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)())  # type: ignore[no-any-return]


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_gradient_that_is_computed_while_its_weight_is_not_gathered_is_refused(level: int) -> None:
    """On one rank, where gathers are exact. A backward pass that reads such a weight would be wrong."""
    model = Hidden()
    sharing = Zero(set_of(model, RecordingGroup("data")), level, Wrapping(), prefetch=0)
    sharing.start_step()
    inputs, targets = vectors(0)
    total = mean_loss(model(inputs), targets)
    sharing.start_backward(last=True)
    if level < 3:
        total.backward()
        sharing.finish_backward()
        sharing.reduce()
        assert all(local.tensor.grad is not None for local in sharing.local_parameters())
        return
    message = r"first\.layer\.\w+ was used while it was not gathered: with zero=3 .* or use zero=2$"
    with pytest.raises(echelon.UserError, match=message):
        total.backward()


def test_weights_that_are_fetched_are_named_by_what_fetches_them() -> None:
    model = Hidden()
    place = HostPlace(PretendedBoundary(Ledger()))
    sharing = Zero(set_of(model, RecordingGroup("data")), 1, Wrapping(), prefetch=0, host=place)
    sharing.start_step()
    inputs, targets = vectors(0)
    total = mean_loss(model(inputs), targets)
    sharing.start_backward(last=True)
    with pytest.raises(echelon.UserError, match=r"with offload=parameters .* or drop offload=parameters"):
        total.backward()


@pytest.mark.parametrize("is_trained", [True, False])
def test_what_other_stages_hold_too_is_sharded_by_itself(is_trained: bool) -> None:
    """Beside other weights it would be cut at a place that depends on them, and every stage has others.

    Frozen ties once were: two stages put different parts of one weight together, and it came out as garbage.
    """
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(6)) for name in ("tied", "own", "other")})
    model.requires_grad_(is_trained)
    parameter_set = set_of(model, DeferredGroup(), separate_shards={model["tied"]})
    sharing = Zero(parameter_set, 3, Wrapping())
    names = [[name for name, _ in flat.parameters] for flat in sharing._flats]
    assert names == [["other", "own"], ["tied"]]


@pytest.mark.parametrize("level", [1, 2, 3])
def test_what_is_frozen_later_is_owned_as_before(level: int) -> None:
    """It was owned twice, in parts and whole: with tensor parallelism boxes overlapped then."""
    model = nn.Linear(4, 4)
    zero = Zero(set_of(model, RecordingGroup("data", 0, 2)), level, Wrapping())
    before = [owned.slice for owned in zero.owned()]
    model.requires_grad_(False)
    assert [owned.slice for owned in zero.owned()] == before


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.unused = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_a_first_module_with_unused_weights_is_let_go_when_the_backward_pass_is_over() -> None:
    """No gradient of its input and no last gradient of its own says when it is through."""
    group, model = DeferredGroup(), nn.Sequential(PartlyUsed(), nn.Linear(2, 2, bias=False))
    sharing = Zero(set_of(model, group), 3, Wrapping())
    sharing.start_step()
    run_microbatch(sharing, model, last=False)
    assert not sharing.residency.in_use
    assert sharing.residency.num_gathered == 0


def test_updates_in_the_backward_pass_take_no_place_of_what_is_gathered_ahead_without_a_host() -> None:
    group, model = DeferredGroup(), ones()
    sharing = Zero(set_of(model, group), 3, Wrapping(), prefetch=2, in_backward=True)
    sharing.start_step()
    sharing.residency.ahead(backward=True)
    assert sharing.residency.num_gathered == 3
