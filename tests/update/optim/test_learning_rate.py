"""Each group's rate is its own base rate times the factor of the step, whatever was set before."""

import pytest
import torch
from torch import nn

from echelon import UserError
from echelon.update.optim import LearningRate, cosine, wsd
from echelon.update.optim.learning_rate import Factor


def make_optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in (0.5, 0.25)]
    return torch.optim.SGD(groups, lr=0.1)


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def test_every_group_keeps_its_proportion() -> None:
    optimizer = make_optimizer()
    rate = LearningRate(optimizer, lambda step: 1 / (step + 1))
    for step, expected in enumerate(([0.5, 0.25], [0.25, 0.125], [0.5 / 3, 0.25 / 3])):
        rate.set(step)
        assert rates_of(optimizer) == pytest.approx(expected, rel=1e-15)


def test_the_rate_depends_on_the_step_alone() -> None:
    # A resumed run sets step 7 first; a factor applied to the rate of the step before would drift.
    schedule = cosine(total=10, warmup=2)
    optimizer, resumed = make_optimizer(), make_optimizer()
    rate = LearningRate(optimizer, schedule)
    for step in range(8):
        rate.set(step)
    LearningRate(resumed, schedule).set(7)
    assert rates_of(optimizer) == rates_of(resumed) == [0.5 * schedule(7), 0.25 * schedule(7)]


def test_without_a_schedule_nothing_is_set() -> None:
    optimizer = make_optimizer()
    rate = LearningRate(optimizer, None)
    optimizer.param_groups[0]["lr"] = 2.0  # by the user, who keeps a schedule of their own
    rate.set(3)
    assert rates_of(optimizer) == [2.0, 0.25]


def test_the_rate_is_what_the_optimizer_uses() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    rate = LearningRate(optimizer, wsd(total=4, decay=4))
    factors = []
    for step in range(4):
        rate.set(step)
        before = weight.item()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        factors.append(before - weight.item())
    assert factors == pytest.approx([1.0, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5])


@pytest.mark.parametrize(
    ("schedule", "by_step", "match"),
    [(cosine(total=10), True, "both set the learning rate"), (None, False, "updates of several steps")],
)
def test_a_scheduler_of_torch_is_refused_where_it_would_not_be_heard(
    schedule: Factor | None, by_step: bool, match: str
) -> None:
    """The schedule overwrote the rates of the scheduler without a word."""
    optimizer = make_optimizer()
    rate = LearningRate(optimizer, schedule, by_step=by_step)
    rate.set(0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(UserError, match=match):
        rate.set(0)


def test_a_scheduler_of_torch_alone_sets_the_rates() -> None:
    optimizer = make_optimizer()
    torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)
    LearningRate(optimizer, None).set(3)
    assert rates_of(optimizer) == [0.25, 0.125]
