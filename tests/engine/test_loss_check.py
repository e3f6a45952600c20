"""Losses that do not add up over the parts of a sequence are refused in the first step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import echelon
from echelon.collectives import RecordingGroup
from echelon.context_parallel import take
from echelon.engine.loss_check import LossCheck
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.mesh import Mesh
from echelon.models import ModelConfig, build
from echelon.plan import Plan
from echelon.verify import Case, assert_equal
from tests.cases import adamw
from tests.contract_models import token_loss
from tests.tensor_parallel.models import SEQUENCE, VOCAB, tokens

Warm = Callable[[int], Ranks]


def gpt(**changes: Any) -> nn.Module:
    return build(ModelConfig("gpt", 2, 16, 4, vocab=VOCAB, sequence=SEQUENCE, **changes))


def refusal(plan: str, batch: Any, loss: Any, make: Callable[[], nn.Module] = gpt, steps: int = 1) -> str:
    """The error of the first steps; empty if there is none."""
    torch.manual_seed(0)
    engine = echelon.parallelize(make(), plan, optimizer=adamw, loss=loss)
    try:
        for step in range(steps):
            engine.step(batch(step))
    except UserError as error:
        return str(error)
    return ""


def mean_over_tokens(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def shifting(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return token_loss(output[:, :-1], targets[:, 1:])


def mean_with_own_mark(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=0)


def all_count(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = tokens(step)
    return inputs, targets.clamp(min=0)


def early_marks(_: int) -> tuple[Tensor, Tensor]:
    inputs, targets = tokens(0)
    targets[:, :4] = 0
    return inputs, targets.clamp(min=0)


def labels(_: int) -> tuple[Tensor, Tensor]:
    inputs, targets = tokens(0)
    return inputs, targets[:, 5]


@pytest.mark.parametrize(
    ("loss", "batch", "says"),
    [
        (mean_over_tokens, tokens, "the loss is a plain mean, and some targets are -100"),
        (shifting, tokens, "the loss of a sequence is not the sum over its parts: total and count"),
        (mean_with_own_mark, early_marks, "return (total, count) of the targets that count"),
        (token_loss, labels, "targets have no positions"),
    ],
)
def test_losses_that_do_not_add_up_are_refused(warm_ranks: Warm, loss: Any, batch: Any, says: str) -> None:
    """It was a mean of means, and none where a rank had nothing to count; pairs across a seam were lost."""
    for error in warm_ranks(2).run(refusal, "context=2", batch, loss):
        assert says in error


def zero_head() -> nn.Module:
    model = gpt()
    nn.init.zeros_(model.head.projection.weight)
    return model


def test_an_output_that_is_the_same_everywhere_is_not_the_one_to_judge_by(warm_ranks: Warm) -> None:
    """All targets then have one loss, and a mean of means is the mean. The second step shows it."""
    plan, arguments = "context=2", (early_marks, mean_with_own_mark, zero_head)
    assert warm_ranks(2).run(refusal, plan, *arguments, 1) == ["", ""]
    for error in warm_ranks(2).run(refusal, plan, *arguments, 2):
        assert "the loss of a sequence is not the sum over its parts" in error


@pytest.mark.usefixtures("warm_contract")
@pytest.mark.parametrize(("loss", "batch"), [(mean_over_tokens, all_count), (token_loss, tokens)])
@pytest.mark.parametrize("plan", ["context=2", "context=2 tensor=2", "context=2 pipeline=2 microbatches=2"])
def test_losses_that_add_up_are_equal_to_one_device(plan: str, loss: Any, batch: Any) -> None:
    assert_equal(Case(gpt, batch, loss, adamw, steps=3), plan)


# On real values alone.

LENGTH = 12  # of the whole sequence: three positions in each of four chunks
TAKEN = [0, 1, 3, 4, 6, 7, 9, 10]  # the first two of each


def values() -> tuple[Tensor, dict[str, Tensor]]:
    """A whole output and targets of three samples."""
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(3, LENGTH, 5, generator=generator)
    targets = torch.randint(5, (3, LENGTH), generator=generator)
    return output, {"tokens": targets, "counted": targets > 1, "label": targets[:, 0]}


def calls_of_the_loss(ranks: int) -> tuple[list[Any], list[str]]:
    """What a check on this rank's part calls the loss with, and what the ranks exchange for it."""
    group = Mesh.join(Plan(context=ranks)).group("context")
    calls: list[Any] = []

    def loss(output: Tensor, targets: Any) -> tuple[Tensor, Tensor]:
        calls.append((output.clone(), {name: leaf.clone() for name, leaf in targets.items()}))
        counted = targets["counted"]
        return output.sum(-1)[counted].sum(), counted.sum()

    whole_output, whole_targets = values()
    output = take(whole_output, group.rank, ranks)
    targets = {
        name: take(leaf, group.rank, ranks) if leaf.ndim > 1 else leaf for name, leaf in whole_targets.items()
    }
    check = LossCheck(loss, group)
    group.ledger.start_step()
    for _ in range(2):  # the second time nothing is left to do
        check.check_targets(whole_targets)
        check.check_result(output, targets, (torch.zeros(()), 1))
    return calls, [f"{move.operation} {move.subject}" for move in group.ledger.moves]


def test_the_loss_is_called_with_a_few_positions_of_the_real_output(warm_ranks: Warm) -> None:
    output, targets = values()
    short = {"tokens": targets["tokens"][:2, TAKEN], "counted": targets["counted"][:2, TAKEN]}
    whole = (output[:2, TAKEN].double(), short)
    parts = [
        (take(whole[0], rank, 2), {name: take(leaf, rank, 2) for name, leaf in short.items()})
        for rank in range(2)
    ]
    for calls, moves in warm_ranks(2).run(calls_of_the_loss, 2):
        assert moves == ["all_gather checks"] * 4
        assert len(calls) == 3
        for (got, got_targets), (expected, expected_targets) in zip(calls, [whole, *parts], strict=True):
            assert torch.equal(got, expected)
            assert got.dtype == torch.float64
            for name, leaf in expected_targets.items():
                assert torch.equal(got_targets[name], leaf)
                assert got_targets[name].dtype == leaf.dtype
            assert torch.equal(got_targets["label"], targets["label"][:2])


def only_whole_batches(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    if len(output) != 6:
        raise ValueError("six samples")
    return shifting(output, targets)


def test_a_loss_that_takes_only_the_shapes_of_the_model_is_not_judged(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(refusal, "context=2", tokens, only_whole_batches) == ["", ""]


@pytest.mark.parametrize(
    "output",
    [torch.zeros(2, 6, 3), torch.zeros(2), (torch.zeros(2, 4, 3), torch.zeros(())), None],
    ids=["length", "samples", "number", "none"],
)
def test_an_output_that_is_not_by_position_is_not_exchanged(output: Any) -> None:
    group = RecordingGroup("context", 0, 2)
    targets, result = torch.zeros(2, 4, dtype=torch.int64), (torch.zeros(()), 1)
    LossCheck(token_loss, group).check_result(output, targets, result)
    assert group.ledger.moves == []
    LossCheck(token_loss, group).check_result(torch.zeros(2, 4, 3), targets, result)
    assert len(group.ledger.moves) == 2


def checks_by_step(plan: str) -> list[bool]:
    torch.manual_seed(0)
    engine = echelon.parallelize(gpt(), plan, optimizer=adamw, loss=token_loss)
    exchanged = []
    for step in range(3):
        engine.step(tokens(step))
        exchanged.append(any(m.subject == "checks" and m.axis == "context" for m in engine.ledger.moves))
    return exchanged


def test_only_the_first_step_is_checked(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(checks_by_step, "context=2") == [[True, False, False]] * 2
