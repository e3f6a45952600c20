"""Before each message of the first step, ranks compare what they are about to do."""

from collections.abc import Callable

import pytest
import torch

from echelon.collectives import Group, MismatchError, RecordingGroup
from echelon.errors import UserError
from echelon.parallel.data.zero.gather_agreement import GatherAgreement, explain_mismatch
from tests.thread_ranks import Exchange, ThreadGroup, run_threads

CPU = torch.device("cpu")
Action = Callable[[GatherAgreement], object]


def answers(*actions: list[Action]) -> list[list[str]]:
    """What each of the actions of each rank says."""

    def run(group: Group) -> list[str]:
        agreement = GatherAgreement(group, group, ["", "layer"], CPU)
        said = []
        for action in actions[group.rank]:
            try:
                action(agreement)
                said.append("")
            except UserError as error:
                said.append(str(error))
        return said

    return run_threads(len(actions), run)


def gather(unit: int) -> Action:
    return lambda agreement: agreement.gather(unit)


def reduce(unit: int) -> Action:
    return lambda agreement: agreement.reduce(unit)


def finish(agreement: GatherAgreement) -> None:
    agreement.finish_pass()


def close(agreement: GatherAgreement) -> None:
    agreement.close()


def test_ranks_that_do_the_same_go_on() -> None:
    actions = [gather(0), gather(1), reduce(1), reduce(0), finish]
    assert answers(actions, actions) == [[""] * 5] * 2


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (
            gather(1),
            gather(0),
            "gathers the weights of module 'layer', and rank 1 gathers the weights of the model itself",
        ),
        (
            gather(1),
            reduce(1),
            "gathers the weights of module 'layer', and rank 1 reduces the gradients of module 'layer'",
        ),
        (reduce(0), finish, "reduces the gradients of the model itself, and rank 1 has finished a pass"),
        (finish, gather(0), "has finished a pass, and rank 1 gathers the weights of the model itself"),
    ],
)
def test_a_difference_names_what_each_is_about_to_do(one: Action, other: Action, words: str) -> None:
    first, second = answers([one, gather(0)], [other, gather(0)])
    assert first == second
    assert first[0].endswith(f"(rank 0 along data {words})")
    assert first[1] == first[0], "it is raised again"


def test_of_three_ranks_the_first_that_differs_is_named() -> None:
    said = answers([gather(0)], [gather(0)], [gather(1)])
    assert "and rank 2 gathers the weights of module 'layer'" in said[0][0]


def test_when_it_is_closed_nobody_talks() -> None:
    assert answers([close, gather(0), finish], [close, gather(1), reduce(0)]) == [[""] * 3] * 2


def test_groups_that_agree_are_told_of_one_that_does_not() -> None:
    """Ranks 0 and 1 shard a copy and differ, ranks 2 and 3 shard another and agree."""
    pairs = [Exchange(2), Exchange(2)]

    def run(everyone: Group) -> tuple[str, list[str]]:
        pair = ThreadGroup(pairs[everyone.rank // 2], everyone.rank % 2, "shard")
        agreement = GatherAgreement(pair, everyone, ["a", "b"], CPU)
        try:
            agreement.gather(int(everyone.rank == 1))
            agreement.finish_pass()
        except UserError as error:
            return str(error).rpartition(" (")[2], [move.subject for move in everyone.ledger.moves]
        return "", []

    (first, subjects), (second, _), (third, _), (fourth, _) = run_threads(4, run)
    assert first == second
    assert first.startswith("rank 0 along shard gathers")
    assert third == fourth
    assert third.startswith("bytes) above the size")
    assert subjects == ["agreement"]


def test_groups_that_all_agree_are_told_so() -> None:
    def run(everyone: Group) -> int:
        agreement = GatherAgreement(RecordingGroup("shard"), everyone, ["a"], CPU)
        agreement.gather(0)
        agreement.finish_pass()
        agreement.close()
        agreement.finish_pass()
        return len(everyone.ledger.moves)

    assert run_threads(2, run) == [1, 1]


def test_an_agreement_with_all_replicas_costs_no_message_more() -> None:
    def run(group: Group) -> int:
        GatherAgreement(group, group, ["a"], CPU).finish_pass()
        return len(group.ledger.moves)

    assert run_threads(2, run) == [1, 1]


def test_a_message_that_met_another_is_explained() -> None:
    with (
        pytest.raises(UserError, match=r"ranks ran different modules in this step.*\(the message\)"),
        explain_mismatch(),
    ):
        raise MismatchError("the message")
    with explain_mismatch():
        pass
