"""Sequences whose length ranks cannot share evenly: padded, and the padding reaches no loss."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import echelon
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import cross_entropy
from echelon.nn.losses import IGNORED_TARGET
from echelon.nn.sequence import WHOLE
from echelon.parallel.padding import LocalTargets, Padding, pad_to
from echelon.plan import Plan
from echelon.verify import Case, assert_equal
from tests.cases import adamw
from tests.contract_models import token_loss
from tests.parallel.tensor.models import VOCAB, language_case, tokens

Warm = Callable[[int], Ranks]


def padding(plan: str, rank: int = 0) -> Padding:
    return Padding(Plan.parse(plan), rank)


# --- what is padded -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "length", "padded"),
    [
        ("context=2", 6, 8),
        ("context=2", 8, 8),
        ("context=3", 7, 12),
        ("context=2 tensor=2", 6, 8),
        ("context=2 tensor=3 sequence=true", 13, 24),
        ("context=2 tensor=4 sequence=true", 8, 8),
    ],
)
def test_a_batch_is_padded_to_the_next_length_that_ranks_share(plan: str, length: int, padded: int) -> None:
    batch = (
        torch.arange(length).repeat(2, 1),
        {"tokens": torch.zeros(2, length, 3), "labels": torch.zeros(2)},
    )
    true_length = padding(plan).true_length(batch)
    assert true_length == (None if length == padded else length)
    inputs, targets = padding(plan).pad(batch, length)
    assert inputs[1].tolist() == [*range(length), *[length - 1] * (padded - length)]
    assert targets["tokens"].shape == (2, padded, 3)
    assert targets["labels"].shape == (2,)


def test_without_context_no_batch_is_padded() -> None:
    assert padding("tensor=2 sequence=true").true_length((torch.zeros(2, 7), torch.zeros(2, 5))) is None
    assert pad_to(torch.tensor([[[1.0], [2.0]]]), 4).tolist() == [[[1.0], [2.0], [2.0], [2.0]]]


@pytest.mark.parametrize(("plan", "length"), [("context=2", 6), ("context=3", 7), ("context=4", 9)])
def test_true_positions_are_counted_once(plan: str, length: int) -> None:
    ranks = Plan.parse(plan).context
    shares = [padding(plan, rank).targets(None, length, 1) for rank in range(ranks)]
    assert sum(each.num_true or 0 for each in shares) == length
    assert sum(each.share for each in shares) == pytest.approx(1)
    assert {each.num_positions * ranks for each in shares} == {padding(plan)._padded(length)}


def test_targets_and_outputs_are_cut() -> None:
    targets = LocalTargets({"tokens": torch.arange(4)[None], "label": torch.ones(1)}, 0.5, 2, 3, 4)
    output, values = targets.without_padding({"logits": torch.zeros(1, 4, 5)}, ignores=False)
    assert output["logits"].shape == (1, 3, 5)
    assert values["tokens"].tolist() == [[0, 1, 2]]
    assert values["label"].shape == (1,)


def test_a_loss_that_ignores_targets_is_given_the_output_uncut() -> None:
    """To cut logits is to copy them."""
    targets, logits = LocalTargets(torch.arange(4)[None], 0.5, 2, 3, 4), torch.zeros(1, 4, 5)
    output, values = targets.without_padding(logits, ignores=True)
    assert output is logits
    assert values.tolist() == [[0, 1, 2, IGNORED_TARGET]]
    assert targets.values.tolist() == [[0, 1, 2, 3]], "those of the batch stay as they are"


@dataclass
class Logits:
    """Its tensor is not found: torch knows nothing of this class."""

    values: Tensor


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize(
    ("output", "found"),
    [
        (torch.zeros(1, 5), r"\[\[1, 5\]\]"),
        (torch.zeros(1), r"\[\[1\]\]"),
        ((torch.zeros(1, 4), torch.zeros(())), r"\[\[1, 4\], \[\]\]"),
        (Logits(torch.zeros(1, 4, 5)), "a Logits without known tensors"),
    ],
)
def test_an_output_that_cannot_be_cut_is_refused(output: Any, found: str, ignores: bool) -> None:
    targets = LocalTargets(torch.zeros(1, 4), 0.5, 2, 3, 4)
    with pytest.raises(UserError, match=f"returned {found} for 4 positions, of which 1 are padding: only an"):
        targets.without_padding(output, ignores=ignores)
    assert LocalTargets(None, 0.5, 1).without_padding(output, ignores=ignores) == (output, None)


# --- what is refused ----------------------------------------------------------------------------------


def test_a_sequence_that_leaves_a_rank_without_positions_is_refused() -> None:
    with pytest.raises(UserError, match=r"a sequence of 3 positions is too short: .* at least 8 positions"):
        padding("context=4").true_length((torch.zeros(2, 3, 1), None))
    assert padding("context=4").true_length((torch.zeros(2, 4, 1), None)) == 4


def test_a_batch_of_vectors_is_refused_and_not_divided_by_features() -> None:
    """A linear layer was given a part of the features, and torch raised about shapes."""
    padding = Padding(Plan.parse("context=2"), 0)
    with pytest.raises(UserError, match=r"vectors \[\[3, 8\]\].*use data instead of context=2"):
        padding.true_length((torch.ones(3, 8), torch.ones(3, 8)))
    mask_beside = {"tokens": torch.ones(3, 8, dtype=torch.int64), "mask": torch.ones(3, 8)}
    assert padding.true_length((mask_beside, torch.ones(3, 8))) is None


def test_lengths_that_differ_are_refused() -> None:
    batch = (torch.zeros(2, 6, 1), torch.zeros(2, 7))
    with pytest.raises(UserError, match=r"\[6, 7\] positions in dim 1, and not all are divisible by 4"):
        padding("context=2").true_length(batch)
    assert padding("context=2").true_length((torch.zeros(2, 4, 1), torch.zeros(2, 8))) is None


class Pooled(nn.Sequential):
    """Returns one vector for a sequence; has a view, so that nothing else is wrong with it."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(VOCAB, 10), nn.Linear(10, 10), Mean())


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.view = WHOLE

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def pooled_loss(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return (output.sum(-1) * targets.sum(1)).sum(), targets.numel()


def refused_and_unchanged(length: int) -> tuple[str, bool]:
    torch.manual_seed(0)
    model = Pooled()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    # The audit finds such a layer first.
    engine = echelon.parallelize(model, "context=2", optimizer=adamw, loss=pooled_loss, audit="off")
    try:
        engine.step(cut(length, tokens, 0))
    except UserError as error:
        return str(error), all(map(torch.equal, before, engine.full_state_dict().values()))
    return "", False


def test_an_output_without_positions_is_refused_before_the_first_update(warm_ranks: Warm) -> None:
    """A mean over positions would count the padding."""
    for error, is_unchanged in warm_ranks(2).run(refused_and_unchanged, 13):
        assert "the model returned [[6, 10]] for 8 positions, of which" in error
        assert is_unchanged


# --- equal to one device ------------------------------------------------------------------------------


def cut(length: int, make: Callable[[int], tuple[Tensor, Tensor]], step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = make(step)
    return inputs[:, :length], targets[:, :length]


def lengths_that_change(step: int) -> tuple[Tensor, Tensor]:
    return cut(16 - 3 * (step % 3), tokens, step)


def case_of(model: str, length: int, steps: int = 4) -> Case:
    return replace(language_case(model, steps), make_batch=partial(cut, length, tokens))


@pytest.mark.slow_cases(
    "context=2 attention=all-to-all-dropping-15",
    "context=2 tensor=2 sequence=true-llama-13",
    "tensor=2 sequence=true-dropping-15",
)
@pytest.mark.usefixtures("warm_contract")
@pytest.mark.parametrize(
    ("plan", "model", "length"),
    [
        ("context=2", "dropping", 13),
        ("context=2 attention=all-to-all", "dropping", 15),
        ("tensor=2 sequence=true", "dropping", 15),
        ("context=2 tensor=2 sequence=true", "llama", 13),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("context=3", "gpt", 16),  # padded to 18, and only 16 positions are learned
                ("context=4", "llama", 5),
                ("context=4 attention=all-to-all", "llama", 13),
                ("context=2 tensor=2 attention=all-to-all", "llama", 15),
                ("context=2 tensor=2 sequence=true", "dropping", 13),
                ("tensor=4 sequence=true", "dropping", 13),
                ("context=2 pipeline=2 microbatches=2", "dropping", 14),
                ("context=2 pipeline=2 schedule=zero-bubble microbatches=2", "gpt", 13),
                ("tensor=2 sequence=true pipeline=2 microbatches=2", "llama", 13),
                ("context=2 data=2 zero=3", "dropping", 13),
                ("context=2 tensor=2 pipeline=2 microbatches=2 attention=all-to-all", "llama", 13),
            ]
        ),
    ],
)
def test_sequences_of_any_length_are_equal_to_one_device(plan: str, model: str, length: int) -> None:
    assert_equal(case_of(model, length), plan)


def mean_over_tokens(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def all_count(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = tokens(step)
    return inputs, targets.clamp(min=0)


@pytest.mark.usefixtures("warm_contract")
@pytest.mark.parametrize(
    ("plan", "loss"),
    [
        ("context=2", mean_over_tokens),
        pytest.param("context=2", token_loss, marks=pytest.mark.slow),
        pytest.param("context=4", mean_over_tokens, marks=pytest.mark.slow),
        pytest.param("tensor=2 sequence=true", mean_over_tokens, marks=pytest.mark.slow),
    ],
)
def test_losses_of_the_user_see_no_padding(plan: str, loss: Any) -> None:
    """A mean over the positions of each rank, of which ranks have different numbers, is weighed by them."""
    assert_equal(replace(case_of("gpt", 13), make_batch=partial(cut, 13, all_count), loss=loss), plan)


@pytest.mark.usefixtures("warm_contract")
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["context=2 pipeline=2 microbatches=2", "pipeline=2 tensor=2 sequence=true"])
def test_lengths_may_change_from_step_to_step(plan: str) -> None:
    assert_equal(replace(case_of("dropping", 16), make_batch=lengths_that_change, steps=6), plan)


def seen_by_the_loss(length: int) -> list[list[int]]:
    """The targets that the loss of this rank is given in a step."""
    calls: list[list[int]] = []

    def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        assert output.shape[:2] == targets.shape
        calls.append(targets[0].tolist())
        return cross_entropy(output, targets)

    torch.manual_seed(0)
    model = language_case("gpt").build()
    engine = echelon.parallelize(model, "context=2", optimizer=adamw, loss=loss, audit="off")
    inputs = torch.zeros(1, length, dtype=torch.int64)
    for _ in range(2):  # the first step also checks the loss
        calls.clear()
        engine.step((inputs, torch.arange(length)[None]))
    return calls


def test_a_loss_is_given_the_true_positions_of_its_rank(warm_ranks: Warm) -> None:
    first, second = warm_ranks(2).run(seen_by_the_loss, 6)
    assert first == [[0, 1]]
    assert second == [[2, 3, 4, 5]]
