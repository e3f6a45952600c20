"""Outputs of a model on every rank of its replica, whatever the plan has cut."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon import UserError
from echelon.engine.outputs import join_rows
from echelon.launching import Ranks
from echelon.models import cross_entropy
from tests.engine.test_own_loop import batches, model, sgd

Warm = Callable[[int], Ranks]


def logits_sum(output: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"logits": output, "chosen": output.gather(-1, targets.clamp(min=0)[..., None])[..., 0]}


def right(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return (output.argmax(-1) == targets).sum(), targets.numel()


def check_outputs(plan: str) -> None:
    batch = batches(0)[0]
    plain = model().eval()
    expected = plain(batch[0]).detach()
    with echelon.parallelize(model(), f"{plan} precision=fp64", optimizer=sgd, loss=cross_entropy) as engine:
        own = engine.local(batch)
        ours = engine.local(expected)
        torch.testing.assert_close(engine.forward(own), ours, rtol=0, atol=1e-9)
        torch.testing.assert_close(engine.predict(own), expected, rtol=0, atol=1e-9)
        seen = engine.evaluate(own, right).measured
        result = engine.forward_backward(own, collect=logits_sum, measure=right)
        torch.testing.assert_close(result.outputs, logits_sum(ours, own[1]), rtol=0, atol=1e-9)
        total, count = right(expected, batch[1])
        assert (result.measured, seen) == pytest.approx((float(total) / count,) * 2, abs=1e-12)
        engine.update()
        with pytest.raises(UserError, match="no gradients wait"):
            engine.update()


@pytest.mark.parametrize("plan", ["data=1", "microbatches=3", "recompute=full"])
def test_on_one_rank(plan: str) -> None:
    check_outputs(plan)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "plan", ["data=2 zero=3", "tensor=2", "pipeline=2 microbatches=4", "pipeline=1-1 microbatches=2"]
)
def test_over_two_ranks(warm_ranks: Warm, plan: str) -> None:
    warm_ranks(2).run(check_outputs, plan)


def test_parts_of_sequences_are_put_together(warm_ranks: Warm) -> None:
    """A measure of them was refused: a rank has a part of the positions."""
    for plan in ("context=2", "context=2 microbatches=2"):
        warm_ranks(2).run(check_outputs, plan)
    warm_ranks(2).run(check_sums_of_parts)


def check_sums_of_parts() -> None:
    with (
        echelon.parallelize(model(), "context=2 precision=fp64", optimizer=sgd, loss=cross_entropy) as engine,
        pytest.raises(UserError, match="collect values of positions"),
    ):
        engine.forward(batches(0)[0], lambda output, _: output.sum((1, 2)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("plan", ["tensor=2 pipeline=2 microbatches=2", "data=2 pipeline=2 microbatches=2"])
def test_over_four_ranks(warm_ranks: Warm, plan: str) -> None:
    warm_ranks(4).run(check_outputs, plan)


def check_uneven_predictions(plan: str) -> list[int]:
    """Replicas have 5 and 3 samples, and 8 and none."""
    (tokens, targets), sizes = batches(0)[0], []
    network = nn.Sequential(model(), nn.Dropout(0.5))
    expected = model().eval()(tokens).argmax(-1).detach()
    with echelon.parallelize(
        network, f"{plan} precision=fp64", optimizer=sgd, loss=cross_entropy, audit="off"
    ) as engine:
        for cut in (5, 8) if not engine.needs_samples else (5,):
            part = slice(0, cut) if engine.replica == 0 else slice(cut, 8)
            predicted = engine.predict((tokens[part], targets[part]), lambda output, _: output.argmax(-1))
            assert torch.equal(predicted, expected)
            sizes.append(len(predicted))
        assert network.training
        engine.module.train()
        assert not torch.equal(engine.forward(engine.local((tokens, targets))), engine.local(expected))
    return sizes


def test_predictions_are_of_the_whole_batch_in_evaluation_mode(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(check_uneven_predictions, "data=2") == [[8, 8]] * 2
    assert warm_ranks(4).run(check_uneven_predictions, "data=2 pipeline=2") == [[8]] * 4


def test_rows_are_joined_and_what_has_none_is_refused() -> None:
    parts = [{"a": torch.ones(2, 3), "word": "same"}, {"a": torch.zeros(1, 3), "word": "same"}]
    joined, samples = join_rows([(parts[0], 2), (None, 0), (parts[1], 1)])
    assert samples == 3
    assert joined["word"] == "same"
    assert joined["a"].tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]
    with pytest.raises(UserError, match=r"must count the samples.*collect=lambda"):
        join_rows([(torch.zeros(()), 2), (torch.zeros(()), 1)])
    assert join_rows([(None, 0)]) == (None, 0)
