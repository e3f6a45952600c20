"""The reducer: when each group of gradients is reduced, in which order, and what it refuses."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import echelon
from echelon.collectives import RecordingGroup
from echelon.collectives.agreement import set_anywhere
from echelon.collectives.group import Reduction, Work
from echelon.errors import UserError
from echelon.parallel.data.reducer import Reducer
from echelon.verify import Case, assert_equal
from tests.cases import adamw, mean_loss, stop, vectors
from tests.groups import DeferredGroup
from tests.reads import HasReadError, no_reads


class Watched:
    """Three weights in the groups [2], [1, 0], and a log of what the reducer does with them."""

    def __init__(self) -> None:
        self.weights = [nn.Parameter(torch.ones(())) for _ in range(3)]
        self.log: list[str] = []
        self.reducer = Reducer(
            self.weights, self._accumulate, lambda index: self.log.append(f"reduce {index}")
        )
        self.regroup([2], [1, 0])

    def _accumulate(self, parameter: nn.Parameter) -> None:
        self.log.append(f"add {self.number(parameter)}")

    def number(self, parameter: nn.Parameter) -> int:
        return next(number for number, weight in enumerate(self.weights) if weight is parameter)

    def regroup(self, *groups: list[int]) -> None:
        self.reducer.regroup([[self.weights[number] for number in group] for group in groups])

    def backward(self, *numbers: int) -> None:
        """The gradients of these weights come, in this order."""
        for number in numbers:
            (2 * self.weights[number]).backward()

    def take_log(self) -> list[str]:
        log, self.log = self.log, []
        return log


def test_a_group_is_reduced_with_its_last_gradient() -> None:
    watched = Watched()
    watched.reducer.start_step()
    watched.reducer.start_backward(reducing=True)
    watched.backward(2, 0)
    assert watched.take_log() == ["add 2", "reduce 0", "add 0"]
    assert not watched.reducer.all_reduced
    watched.backward(1)
    assert watched.take_log() == ["add 1", "reduce 1"]
    assert watched.reducer.all_reduced
    watched.reducer.flush()
    assert watched.take_log() == []


def test_a_group_that_is_complete_early_waits_for_those_before_it() -> None:
    """Ranks must reduce in one order, whatever the order of their gradients."""
    watched = Watched()
    watched.reducer.start_step()
    watched.reducer.start_backward(reducing=True)
    watched.backward(0, 1)
    assert watched.take_log() == ["add 0", "add 1"]
    watched.backward(2)
    assert watched.take_log() == ["add 2", "reduce 0", "reduce 1"]


def test_earlier_microbatches_only_add_up() -> None:
    watched = Watched()
    watched.reducer.start_step()
    for reducing in (False, False, True):
        watched.reducer.start_backward(reducing=reducing)
        watched.backward(0, 1, 2)
        watched.reducer.flush()
    added = ["add 0", "add 1", "add 2"]
    assert watched.take_log() == [*added, *added, *added, "reduce 0", "reduce 1"]


def test_every_microbatch_may_reduce() -> None:
    watched = Watched()
    watched.reducer.start_step()
    for _ in range(2):
        watched.reducer.start_backward(reducing=True)
        watched.backward(2, 1, 0)
    assert watched.take_log() == ["add 2", "reduce 0", "add 1", "add 0", "reduce 1"] * 2


def test_what_the_backward_pass_did_not_reach_is_reduced_at_its_end() -> None:
    watched = Watched()
    watched.reducer.start_step()
    watched.reducer.start_backward(reducing=True)
    watched.backward(0)
    watched.reducer.flush()
    assert watched.take_log() == ["add 0", "reduce 0", "reduce 1"]
    assert watched.reducer.all_reduced


def test_a_gradient_after_its_group_was_reduced_is_an_error() -> None:
    watched = Watched()
    watched.reducer.start_step()
    watched.reducer.start_backward(reducing=True)
    watched.backward(2)
    with pytest.raises(
        UserError, match=r"shape \(\) got a gradient again after it was reduced: .*use_reentrant"
    ):
        watched.backward(2)
    watched.reducer.start_backward(reducing=True)
    watched.backward(2)  # of the next microbatch


class Reentrant(nn.Module):
    """One layer inside two reentrant checkpoints: its gradient comes twice in one backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return self.last(x)  # type: ignore[no-any-return]


@pytest.mark.usefixtures("warm_contract")
def test_a_gradient_that_comes_twice_is_an_error_not_a_wrong_sum() -> None:
    with pytest.raises(echelon.UserError, match="use_reentrant=False"):
        assert_equal(Case(Reentrant, vectors, mean_loss, adamw, steps=2), "data=2")


def test_backward_passes_of_the_users_own_are_refused() -> None:
    watched = Watched()
    with pytest.raises(UserError, match=r"write engine.backward\(loss\)"):
        watched.backward(0)
    watched.reducer.start_step()
    watched.reducer.start_backward(reducing=True)
    watched.backward(0, 1, 2)
    watched.reducer.flush()
    with pytest.raises(UserError, match=r"See docs/loops\.md"):
        watched.backward(0)
    watched.reducer.finish_step()
    with pytest.raises(UserError, match="gradients of this rank alone"):
        watched.backward(0, 1, 2)


def test_a_gradient_of_none_completes_its_group_and_counts_as_unused() -> None:
    """torch calls the hook although the function has no gradient for the weight."""
    watched = Watched()
    watched.reducer.start_step()
    watched.reducer.start_backward(reducing=True)
    stop(watched.weights[2]).backward()
    assert watched.take_log() == ["reduce 0"]
    assert watched.reducer.used == set()


def test_matrices_may_add_in_place_in_a_step_while_nothing_is_reduced() -> None:
    watched = Watched()
    accumulation = watched.reducer.accumulation
    states = [accumulation.is_open]
    watched.reducer.start_step()
    states.append(accumulation.is_open)
    watched.reducer.start_backward(reducing=True)
    states.append(accumulation.is_open)
    watched.reducer.start_backward(reducing=False)
    states.append(accumulation.is_open)
    watched.reducer.finish_step()
    states.append(accumulation.is_open)
    assert states == [False, True, False, True, False]


def test_only_the_last_group_of_the_last_set_is_reduced_while_no_backward_pass_goes_on() -> None:
    watched, following = Watched(), Watched()
    assert [watched.reducer.overlaps(index) for index in (0, 1)] == [True, True]  # other stages may follow
    watched.reducer.is_alone = following.reducer.is_alone = True
    assert [watched.reducer.overlaps(index) for index in (0, 1)] == [True, False]
    following.reducer.follow(watched.reducer)
    assert [each.reducer.overlaps(1) for each in (watched, following)] == [True, False]


def test_used_anywhere_is_of_this_step_alone() -> None:
    watched = Watched()
    group = RecordingGroup("data", 0, 2)
    for number in (0, 1):
        watched.reducer.start_step()
        watched.reducer.start_backward(reducing=False)
        watched.backward(number)
        used = watched.reducer.exchange_used(group).wait()
        assert {watched.number(parameter) for parameter in used} == {number}
    assert {move.subject for move in group.ledger.moves} == {"used parameters"}
    assert Reducer([], watched._accumulate, lambda _: None).exchange_used(group).wait() == set()


def test_the_agreed_order_is_that_of_arrival_and_the_rest_reversed() -> None:
    watched = Watched()
    watched.reducer.start_step()
    watched.reducer.start_backward(reducing=False)
    watched.backward(1, 1)
    order = watched.reducer.agreed_order(RecordingGroup("data", 0, 2))
    assert [watched.number(parameter) for parameter in order] == [1, 2, 0]
    watched.reducer.start_step()
    watched.reducer.start_backward(reducing=False)
    watched.backward(0, 2)
    order = watched.reducer.agreed_order(RecordingGroup("data", 0, 2))
    assert [watched.number(parameter) for parameter in order] == [0, 2, 1]


def test_new_groups_count_from_the_next_backward_pass_on() -> None:
    watched = Watched()
    watched.regroup([0], [1], [2])
    watched.reducer.start_step()
    watched.reducer.start_backward(reducing=True)
    watched.backward(0, 1, 2)
    assert watched.take_log() == ["add 0", "reduce 0", "add 1", "reduce 1", "add 2", "reduce 2"]


def test_a_closed_reducer_hears_of_nothing() -> None:
    watched = Watched()
    watched.reducer.start_step()
    watched.reducer.close()
    watched.backward(0)
    assert watched.take_log() == []
    assert not any(weight._post_accumulate_grad_hooks for weight in watched.weights)


# Flags that any rank may set: read only by a rank that does not know the answer by itself.


CPU = torch.device("cpu")


class OtherRank(RecordingGroup):
    """The other rank has set `flags`."""

    def __init__(self, *flags: bool) -> None:
        super().__init__("data", 0, 2)
        self._flags = flags

    def _all_reduce(self, tensor: torch.Tensor, op: Reduction) -> Work:
        assert op == "max"
        work = super()._all_reduce(tensor, op)
        tensor.copy_(torch.maximum(tensor, torch.tensor(self._flags, dtype=tensor.dtype)))
        return work


def test_a_flag_is_set_where_any_rank_has_set_it() -> None:
    assert list(set_anywhere([True, False, False], OtherRank(False, False, True), CPU)) == [True, False, True]


def test_a_rank_that_has_set_all_flags_takes_part_and_reads_nothing() -> None:
    group = DeferredGroup()
    with no_reads():
        assert list(set_anywhere([True, True], group, CPU)) == [True, True]
        with pytest.raises(HasReadError):
            set_anywhere([True, False], group, CPU)
    assert [move.operation for move in group.ledger.moves] == ["all_reduce", "all_reduce"]
    assert [move.traffic.payload for move in group.ledger.moves] == [2, 2]
