"""A model or a loss that mixes samples is refused in the first step, where the plan cuts the batch.

Each of these trained without a word before: the parts of a batch were computed one by one, and their sum was
not what one device computes of the whole batch.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import echelon
from echelon.engine import Engine
from echelon.errors import UserError
from echelon.launching import Ranks
from tests.cases import mean_loss, sgd

Warm = Callable[[int], Ranks]
Loss = Callable[..., Any]
WEIGHTS = torch.tensor([1.0, 5.0, 0.2, 1.0, 2.0])


class Mixing(nn.Module):
    """Computes with what a function makes of the whole batch."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.mix = nn.Linear(6, 8), nn.Linear(8, 5), mix

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.mix(self.first(x)))
        return output


class Jitter(nn.Module):
    """Noise of its own, from torch's generator or from one that it keeps."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(6, 5), generator

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype) if self.training else 0.0
        output: Tensor = self.layer(x + noise)
        return output


class Fixed(nn.Module):
    """Takes microbatches of four, and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x.view(4, 6))
        return output


class Memory(nn.Module):
    """Counts its calls, keeps what it saw, and changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 5), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        self.last_input = x.add_(1)
        output: Tensor = self.layer(x)
        return output


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def normalised(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, **options), nn.Linear(8, 5))


class Iterating(nn.Module):
    """Divides by the largest singular value of its weight, of which each call improves an estimate."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.register_buffer("direction", torch.ones(6))
        for _ in range(200):
            self.improve()

    @torch.no_grad()
    def improve(self) -> None:
        weight = self.layer.weight
        self.direction.copy_(F.normalize(weight.T @ (weight @ self.direction), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        self.improve()
        output: Tensor = self.layer(x) / (self.layer.weight @ self.direction).norm()
        return output


def batch(step: int = 0, samples: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    targets = torch.randint(1, 5, (samples,), generator=generator)
    return torch.randn(samples, 6, generator=generator), targets


def engine_of(
    model: nn.Module, plan: str = "microbatches=2", loss: Loss = mean_loss, **options: Any
) -> Engine:
    torch.manual_seed(0)
    return echelon.parallelize(model, plan, optimizer=sgd, loss=loss, **options)


def refusal(model: nn.Module, loss: Loss = mean_loss, plan: str = "microbatches=2") -> str:
    engine = engine_of(model, plan, loss)
    before = {name: value.clone() for name, value in engine.full_state_dict().items()}
    with pytest.raises(UserError) as caught:
        engine.step(batch())
    assert engine.steps == 0
    assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
    return str(caught.value)


def outcome(engine: Engine) -> str:
    """Of the entry about samples, after a step."""
    engine.step(batch())
    return str(engine.audit[1])


MIXES = {
    "softmax over samples": lambda x: x.softmax(0),
    "a norm over samples": lambda x: (x - x.mean(0)) / (x.std(0) + 1e-5),
    "sorted": lambda x: x.sort(0).values,
    "the batch before": lambda x: x.cumsum(0),
    "the number of samples": lambda x: x / len(x),
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_models_that_mix_samples(mix: Callable[[Tensor], Tensor], precision: str) -> None:
    error = refusal(Mixing(mix), plan=f"microbatches=2 precision={precision}")
    assert "the model mixes samples" in error
    assert "among 4 samples, and of" in error
    assert "microbatches=1 data=1, or audit='off'" in error


LOSSES: dict[str, Loss] = {
    "weights of classes": lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS.to(o.dtype)),
    "pairs of samples": lambda o, t: F.cross_entropy(o @ o.T, torch.arange(len(t))),
    "a mean as a total": lambda o, t: (F.cross_entropy(o, t), len(t)),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_that_do_not_add_up(loss: Loss) -> None:
    error = refusal(plain(), loss)
    assert "the loss does not add up over samples" in error
    assert "return (total, count)" in error


def test_a_class_weight_is_found_where_the_batch_has_one_class() -> None:
    engine = engine_of(plain(), loss=LOSSES["weights of classes"])
    inputs, targets = batch()
    with pytest.raises(UserError, match=r"weighs targets of .* differently"):
        engine.step((inputs, torch.cat([torch.full_like(targets[:4], 3), targets[4:]])))


def test_the_weight_of_a_class_that_no_batch_has_yet() -> None:
    engine = engine_of(plain(), loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 1.0, 1.0, 3.0])))
    inputs, targets = batch()
    with pytest.raises(UserError, match="weighs targets of some of the classes 0 to 4 differently"):
        engine.step((inputs, torch.ones_like(targets)))


def test_calls_that_change_what_the_next_one_computes() -> None:
    """An iteration runs once per step on one device, and once per microbatch here. At first it has converged,
    so that nothing differs; later it would lag behind the weights by other numbers of calls."""
    assert "each call changes a buffer that the next one computes with" in refusal(Iterating())
    engine_of(Iterating(), "data=1").step(batch())  # is called once


@pytest.mark.parametrize("ignored", [-100, 0])
def test_ignored_targets_that_appear_later(ignored: int) -> None:
    """The first batches have none, so that nothing differs; the step that has one is refused."""
    engine = engine_of(plain(), loss=nn.CrossEntropyLoss(ignore_index=ignored))
    for step in range(2):
        engine.step(batch(step))
    inputs, targets = batch(2)
    targets[1] = ignored
    with pytest.raises(UserError, match=f"leaves out targets of {ignored}, of which one sample has 0"):
        engine.step((inputs, targets))
    assert engine.steps == 2


class OwnMean(nn.Module):
    """Returns its loss with its output."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(6, 5), loss

    def forward(self, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x)
        return {"loss": self.loss(logits, targets), "logits": logits}


def over_samples(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="sum") / len(targets)


@pytest.mark.parametrize("ignored", [-100, 3])
def test_ignored_targets_that_appear_later_for_a_model_with_its_own_loss(ignored: int) -> None:
    # Its loss cannot be asked with made-up targets, and so nobody looked at later batches.
    model = OwnMean(nn.CrossEntropyLoss(ignore_index=ignored))
    engine = echelon.parallelize(model, "microbatches=2", optimizer=sgd, loss=None)
    inputs, targets = batch()
    engine.step((inputs, torch.ones_like(targets)))
    targets.fill_(1)[1] = ignored
    with pytest.raises(UserError, match=f"{ignored}.*, of which one sample has 0 and another 1"):
        engine.step((inputs, targets))
    assert engine.steps == 1


def test_a_model_whose_own_loss_is_a_mean_over_samples_may_leave_out_targets() -> None:
    """As the first batch shows, in which it does."""
    engine = echelon.parallelize(OwnMean(over_samples), "microbatches=2", optimizer=sgd, loss=None)
    inputs, targets = batch()
    targets[1] = -100
    engine.step((inputs, targets))
    targets[2] = -100
    engine.step((inputs, targets))
    assert engine.steps == 2


def test_as_many_ignored_targets_in_every_sample_are_right() -> None:
    """Shifted labels leave out the last position of each sample, or another batch the last two."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.unsqueeze(2).expand(-1, -1, 3), targets)

    engine = engine_of(plain(), loss=loss)
    for step in range(2):
        inputs, targets = batch(step)
        second = targets if step == 0 else torch.full_like(targets, -100)
        engine.step((inputs, torch.stack([targets, second, torch.full_like(targets, -100)], 1)))
    assert engine.steps == 2


def test_a_loss_that_counts_what_it_leaves_out_is_right() -> None:
    def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(output, targets, reduction="sum"), (targets != -100).sum()

    engine = engine_of(plain(), loss=loss)
    inputs, targets = batch()
    targets[1] = -100
    engine.step((inputs, targets))
    assert str(engine.audit[1]) == "samples: held"


def test_nothing_is_asked_where_the_batch_is_not_cut_or_the_audit_is_off() -> None:
    for plan, audit in (("data=1", "first"), ("microbatches=2", "off")):
        engine = engine_of(Mixing(MIXES["sorted"]), plan, LOSSES["pairs of samples"], audit=audit)
        engine.step(batch())
        assert not any(result.name == "samples" for result in engine.audit)


def test_dropout_drops_the_same_in_parts() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 5))
    assert outcome(engine_of(model)) == "samples: held"


@pytest.mark.parametrize("track_running_stats", [True, False])
def test_batch_norm_is_left_to_its_rule(track_running_stats: bool) -> None:
    """Which refuses it with microbatches, and not because it mixes samples."""
    with pytest.raises(UserError, match="takes its statistics over the whole batch"):
        engine_of(normalised(track_running_stats=track_running_stats)).step(batch())


def test_random_forwards_are_compared_in_evaluation_mode() -> None:
    assert "held (in evaluation mode" in outcome(engine_of(Jitter()))


def test_a_forward_with_a_generator_of_its_own_is_not_taken_for_mixing() -> None:
    assert "held (in evaluation mode" in outcome(engine_of(Jitter(torch.Generator())))


def test_a_model_that_takes_whole_microbatches_alone_trains() -> None:
    assert "skipped (the model does not take a part of a microbatch: RuntimeError" in outcome(
        engine_of(Fixed())
    )


def test_a_loss_that_takes_whole_microbatches_alone_was_not_asked() -> None:
    # The entry held, although the loss had refused every part.
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.view(4, 5), targets)

    assert "samples: skipped (outputs held, but the loss does not take a part of a microbatch: " in outcome(
        engine_of(plain(), loss=loss)
    )


def test_one_sample_is_asked_again_with_the_next_batch() -> None:
    engine = engine_of(Mixing(MIXES["softmax over samples"]))
    engine.step(batch(samples=1))
    assert engine.audit[1].outcome == "skipped"
    with pytest.raises(UserError, match="mixes samples"):
        engine.step(batch())


def test_no_trace_is_left() -> None:
    """Buffers, attributes, modes, the user's batch and the generators are as without an audit."""
    states, results = [], []
    for audit in ("off", "first"):
        torch.manual_seed(0)
        model = Memory()
        engine = engine_of(model, audit=audit)
        model.layer.eval()
        torch.manual_seed(7)
        metrics = engine.step(batch())
        results.append(
            (metrics.loss, metrics.grad_norm, model.calls, model.seen.item(), model.layer.training)
        )
        states.append((torch.get_rng_state(), *engine.full_state_dict().values()))
    assert results[0] == results[1]
    assert results[0][2:] == (2, 2.0, False)
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


def test_it_costs_one_forward() -> None:
    """Counted in samples that go through the first module."""
    for plan, samples in (("microbatches=2", 8), ("microbatches=4", 8), ("microbatches=2", 4)):
        model = plain()
        engine = engine_of(model, plan)
        seen: list[int] = []
        model[0].register_forward_pre_hook(lambda _, args, seen=seen: seen.append(len(args[0])))  # type: ignore[misc]
        engine.step(batch(samples=samples))
        assert sum(seen) - samples <= 1.5 * samples
        seen.clear()
        engine.step(batch(samples=samples))
        assert sum(seen) == samples


def refused_on(plan: str, model: Callable[[], nn.Module], loss: Loss, samples: int) -> str:
    """In a rank: the error of its first step, or what the audit found."""
    torch.manual_seed(0)
    engine = echelon.parallelize(model(), plan, optimizer=sgd, loss=loss)
    inputs, targets = batch(samples=samples)
    try:
        engine.step(engine.local((inputs, targets)))
    except UserError as error:
        return str(error)
    return "; ".join(map(str, engine.audit))


def softmax_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Softmax(0), nn.Linear(8, 5))


def weighted_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets, weight=WEIGHTS)


def refused_later(plan: str) -> tuple[str, int]:
    """In a rank: the error of the step in which the last replica has an ignored target, and the steps."""
    engine = engine_of(plain(), plan, loss=F.cross_entropy)
    engine.step(engine.local(batch()))
    inputs, targets = engine.local(batch(1))
    targets[0] = -100 if engine.replica == 1 else targets[0]
    with pytest.raises(UserError) as caught:
        engine.step((inputs, targets))
    return str(caught.value), engine.steps


def test_ignored_targets_of_one_rank_are_refused_by_all(warm_ranks: Warm) -> None:
    # The other rank went on, and waited for gradients that never came.
    first, second = warm_ranks(2).run(refused_later, "data=2")
    assert "leaves out targets of -100, of which one sample has 0 and another 1" in first[0]
    assert first == second
    assert first[1] == 1


@pytest.mark.parametrize("plan", ["data=2", "data=2 zero=3", "pipeline=2 microbatches=2"])
def test_every_rank_is_told(warm_ranks: Warm, plan: str) -> None:
    ranks = warm_ranks(2)
    for model, loss, samples, says in (
        (softmax_model, mean_loss, 8, "the model mixes samples"),
        (plain, weighted_loss, 8, "the loss does not add up"),
        (softmax_model, mean_loss, 2, "the model mixes samples"),  # one sample for each replica
        (plain, mean_loss, 8, "samples: held"),
        *(
            [(normalised, mean_loss, 8, "samples: held (1 with running statistics)")]
            if "data" in plan
            else []
        ),
    ):
        first, second = ranks.run(refused_on, plan, model, loss, samples)
        assert says in first
        assert first == second
