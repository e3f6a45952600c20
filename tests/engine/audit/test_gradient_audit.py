"""What a plan would train otherwise than one device is refused before the step changes a weight.

Each of these trained without a word before: the parts of a batch were computed one by one, and their sum was
not what one device computes of the whole batch.
"""

import random
import re
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import echelon
from echelon.engine import Engine
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import ModelConfig, build, cross_entropy
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
        self.seen += len(x)
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
    """Of gradients, after a step."""
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
    assert re.search(r"The model mixes samples: its output for sample \d is another when only 2", error)
    assert "use data=1 and microbatches=1; audit='off'" in error


class Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return gradient - gradient.mean(0)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_backward_passes_that_mix_samples(precision: str) -> None:
    error = refusal(Mixing(Centred.apply), plan=f"microbatches=2 precision={precision}")
    assert "The backward pass mixes samples" in error


@pytest.mark.slow
def test_sums_that_one_device_rounds_as_coarsely_are_no_difference() -> None:
    """torch's norm adds the gradients of its bias up in bf16 on a CPU. Here these nearly cancel out: one
    batch is 30 % from what float64 gives, two microbatches are 15 %, and 25 % lie between them."""
    torch.manual_seed(0)
    model = build(ModelConfig("gpt", layers=4, width=256, heads=4, vocab=512, sequence=256, tied=True))
    tokens, targets = torch.randint(0, 512, (2, 4, 256)).unbind()
    plan = "precision=bf16 microbatches=2"
    with echelon.parallelize(model, plan, optimizer=torch.optim.AdamW, loss=cross_entropy) as engine:
        for _ in range(2):
            engine.step((tokens, targets))
        assert [str(each) for each in engine.audit] == ["finite weights: held", "gradients: held"]


LOSSES: dict[str, Loss] = {
    "weights of classes": lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS.to(o.dtype)),
    "pairs of samples": lambda o, t: F.cross_entropy(o @ o.T, torch.arange(len(t))),
    "a mean as a total": lambda o, t: (F.cross_entropy(o, t), len(t)),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_that_do_not_add_up(loss: Loss) -> None:
    error = refusal(plain(), loss)
    assert "The loss does not add up over samples" in error
    assert "return (total, count)" in error


def test_a_class_weight_is_found_where_the_batch_has_one_class() -> None:
    engine = engine_of(plain(), loss=LOSSES["weights of classes"])
    inputs, targets = batch()
    with pytest.raises(UserError, match="loss does not add up over samples"):
        engine.step((inputs, torch.cat([torch.full_like(targets[:4], 3), targets[4:]])))


def test_the_weight_of_a_class_that_no_batch_had_before() -> None:
    engine = engine_of(plain(), loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 1.0, 1.0, 3.0])))
    inputs, targets = batch()
    for _ in range(2):
        engine.step((inputs, torch.ones_like(targets)))
    with pytest.raises(UserError, match="loss does not add up over samples"):
        engine.step((inputs, torch.where(torch.arange(8) == 5, 4, 1)))
    assert engine.steps == 2


def test_calls_that_change_what_the_next_one_computes() -> None:
    """An iteration runs once per step on one device, and once per microbatch here. At first it has converged,
    so that nothing differs; later it lags behind the weights by other numbers of calls."""
    engine = engine_of(Iterating())
    engine.step(batch())
    with pytest.raises(UserError, match="from call to call"):
        engine.step(batch(1))
    engine_of(Iterating(), "data=1").step(batch())  # is called once


@pytest.mark.parametrize("ignored", [-100, 0])
def test_ignored_targets_that_appear_later(ignored: int) -> None:
    """The first batches have none, so that nothing differs; the step that has one is refused."""
    engine = engine_of(plain(), loss=nn.CrossEntropyLoss(ignore_index=ignored))
    for step in range(2):
        engine.step(batch(step))
    inputs, targets = batch(2)
    targets[1] = ignored
    with pytest.raises(UserError, match="loss does not add up over samples"):
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
    with pytest.raises(UserError, match=r"samples: it is|mixes samples"):
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
    assert str(engine.audit[1]) == "gradients: held"


def test_a_batch_that_is_not_cut_may_be_mixed_and_nothing_is_asked_where_the_audit_is_off() -> None:
    for plan, audit in (("data=1", "first"), ("microbatches=2", "off")):
        engine = engine_of(Mixing(MIXES["sorted"]), plan, LOSSES["pairs of samples"], audit=audit)
        engine.step(batch())
        assert [result.outcome for result in engine.audit] == (["held", "held"] if audit == "first" else [])


def test_dropout_drops_the_same_in_parts() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 5))
    assert outcome(engine_of(model)) == "gradients: held"


@pytest.mark.parametrize("track_running_stats", [True, False])
def test_batch_norm_is_left_to_its_rule(track_running_stats: bool) -> None:
    """Which refuses it with microbatches, and not because it mixes samples."""
    with pytest.raises(UserError, match="takes its statistics over the whole batch"):
        engine_of(normalised(track_running_stats=track_running_stats)).step(batch())


class NumpyJitter(nn.Module):
    """Noise that no sample has for its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        noise = numpy.random.standard_normal(x.shape) if self.training else numpy.zeros(x.shape)
        output: Tensor = self.layer(x + torch.as_tensor(noise, dtype=x.dtype))
        return output


class OwnJitter(NumpyJitter):
    """By a generator of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype) if self.training else 0.0
        output: Tensor = self.layer(x + noise)
        return output


@pytest.mark.parametrize("make", [NumpyJitter, OwnJitter])
def test_draws_that_parts_cannot_repeat_are_compared_in_evaluation_mode_and_that_is_said(
    make: Callable[[], nn.Module],
) -> None:
    numpy.random.seed(0)
    with pytest.warns(UserWarning, match="in evaluation mode alone: the forward draws numbers"):
        assert "skipped (in evaluation mode alone" in outcome(engine_of(make(), seed=None))


def test_one_draw_for_all_samples_is_the_same_for_parts_of_them() -> None:
    class Depth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.layer(x) * (1 + random.random())
            return output

    assert outcome(engine_of(Depth(), seed=None)) == "gradients: held"


def test_a_model_that_takes_no_batch_but_its_own_is_said_to_be_unknown() -> None:
    with pytest.warns(UserWarning, match="the model cannot be run by itself: RuntimeError"):
        assert "gradients: skipped" in outcome(engine_of(Fixed()))


def test_a_loss_that_takes_whole_microbatches_is_given_them() -> None:
    def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return F.cross_entropy(output.view(-1, 4, 5).flatten(0, 1), targets, reduction="sum"), len(targets)

    assert outcome(engine_of(plain(), loss=loss)) == "gradients: held"


def test_one_sample_holds_and_the_next_step_is_asked() -> None:
    engine = engine_of(Mixing(MIXES["softmax over samples"]))
    engine.step(batch(samples=1))
    assert engine.audit[1].outcome == "held"  # there is nothing to mix
    with pytest.raises(UserError, match="mixes samples"):
        engine.step(batch())


def double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def test_a_hook_that_changes_accumulated_gradients_is_part_of_both_sides() -> None:
    model = plain()
    model[0].weight.register_post_accumulate_grad_hook(double)
    assert outcome(engine_of(model, "data=1")) == "gradients: held"


def test_a_loss_that_holds_parameters_itself() -> None:
    model = plain()
    parameters = list(model.parameters())

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return mean_loss(output, targets) + sum(p.square().sum() for p in parameters)

    assert outcome(engine_of(model, loss=loss)) == "gradients: held"


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
        results.append((metrics.loss, metrics.grad_norm, model.seen.item(), model.layer.training))
        states.append((torch.get_rng_state(), *engine.full_state_dict().values()))
        assert model.calls == (2 if audit == "off" else 1), "an audit finds that calls count steps"
    assert results[0] == results[1]
    assert results[0][2:] == (8.0, False)
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


class Squares(Memory):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += len(x) ** 2
        return super().forward(x)


def test_what_microbatches_count_otherwise_than_one_device_is_said_once() -> None:
    engine = engine_of(Squares())
    with pytest.warns(UserWarning, match="forwards count something in calls, and") as caught:
        _ = [engine.step(batch(step)) for step in range(4)]
    assert len(caught) == 1


class Turns(Memory):
    """Counts 1, 2, 0, and multiplies by that."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = (self.calls + 1) % 3
        return super().forward(x) * (1 + self.calls)


def test_what_calls_move_is_moved_once_in_each_step() -> None:
    losses = []
    for plan, audit in (
        ("data=1", "off"),
        ("microbatches=4", "sampled"),
        ("microbatches=2 recompute=full", "first"),
    ):
        torch.manual_seed(0)
        engine = engine_of(Turns(), plan, audit=audit)
        losses.append([engine.step(batch(step)).loss for step in range(9)])
    assert losses[1] == pytest.approx(losses[0])
    assert losses[2] == pytest.approx(losses[0])


class Reads(nn.Module):
    """Each call reads a row of its own, and keeps an output in a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.position = nn.Linear(6, 5), 0
        self.register_buffer("last", torch.zeros(5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.rows(x) + self.position
        self.position += 1
        self.last = output.detach().mean(0)
        return output


def test_passes_without_an_update_count_too() -> None:
    model = Reads()
    engine = engine_of(model)
    with pytest.warns(UserWarning, match="in buffers that no checkpoint has: last"):
        engine.step(batch())
    engine.evaluate(batch())
    positions = [float((engine.predict(batch()) - model.rows(batch()[0])).detach().mean()) for _ in range(2)]
    assert positions == pytest.approx([2, 3])
    assert model.position == 4


class CountsInABuffer(nn.Module):
    """Warms up for so many calls."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(6, 5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        output: Tensor = self.rows(x) * torch.where(self.calls > 100, 1.0, 0.5)
        return output


def test_a_count_in_a_buffer_that_no_checkpoint_has_is_refused() -> None:
    """Gradients agree until the hundredth call, which microbatches reach earlier."""
    with pytest.raises(UserError, match=r"\(calls\).*count in an attribute"):
        engine_of(CountsInABuffer(), "microbatches=2").step(batch())
    engine_of(CountsInABuffer(), "data=1").step(batch())


class Samples(Memory):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += len(x) - 1
        return super().forward(x)


def test_samples_are_counted_in_every_microbatch_also_if_it_has_one() -> None:
    model = Samples()
    engine = engine_of(model, "microbatches=8")
    for step in range(2):
        engine.step(batch(step))
    assert model.calls == 16


def test_it_costs_few_samples() -> None:
    """Counted in samples that go through the first module, in steps that are audited and one that is not."""
    for plan, most in (("microbatches=2", 10), ("microbatches=8", 22)):
        model, seen = plain(), array("q")  # of a list, the audit puts back what was there
        model[0].register_forward_pre_hook(lambda _, args, seen=seen: seen.append(len(args[0])))  # type: ignore[misc]
        engine = engine_of(model, plan)
        counts = []
        for step in range(3):
            del seen[:]
            engine.step(batch(step, samples=64))
            counts.append(sum(seen) - 64)
        assert 0 < counts[0] <= most
        assert 0 < counts[1] <= most
        assert counts[2] == 0


class Scaled(nn.Module):
    """The gradient of its shift is a millionth of the others, and of another batch."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.layer, self.shift, self.mixes = nn.Linear(6, 5), nn.Parameter(torch.zeros(5)), mixes

    def forward(self, x: Tensor) -> Tensor:
        shift = 1e-7 * self.shift * (x.mean() if self.mixes else x[:, :1])
        output: Tensor = self.layer(x) + shift
        return output


def test_a_small_gradient_is_compared_by_its_own_size() -> None:
    assert "differ from shift" in refusal(Scaled(True), plan="microbatches=2 precision=fp64")
    assert outcome(engine_of(Scaled(False), "microbatches=2 precision=fp64")) == "gradients: held"


class Attending(nn.Module):
    """Adds the same to all scores of a softmax: but for rounding, that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.value, self.last = nn.Linear(6, 1), nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.stack([x, x.flip(1), x.cos()], 1)
        output: Tensor = self.last((self.score(steps).softmax(1) * self.value(steps)).sum(1))
        return output


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_gradients_of_nothing_but_rounding_hold(precision: str) -> None:
    engine = engine_of(Attending(), f"microbatches=4 precision={precision}", audit="always")
    for step in range(3):
        engine.step(batch(step))
        assert str(engine.audit[1]) == "gradients: held"


def pipedream(audit: str) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(1)
    engine = engine_of(plain(), "pipeline=2 schedule=pipedream microbatches=2 precision=fp64", audit=audit)
    losses = [engine.step(batch(step)).loss for step in range(3)]
    return losses, list(engine.full_state_dict().values())


def test_an_audit_changes_no_pipedream(warm_ranks: Warm) -> None:
    """What was counted in the audit went into the first update."""
    ranks = warm_ranks(2)
    (losses, state), (audited, same) = (ranks.run(pipedream, audit)[0] for audit in ("off", "sampled"))
    assert losses == audited
    assert all(torch.equal(one, other) for one, other in zip(state, same, strict=True))


def audited_while_the_host_updates(plan: str) -> list[str]:
    torch.manual_seed(0)
    adam = partial(torch.optim.Adam, lr=1e-2)
    engine = echelon.parallelize(plain(), plan, optimizer=adam, loss=mean_loss)
    found = []
    for step in range(4):
        engine.step(engine.local(batch(step)))
        found.append(str(engine.audit[1]))
    return found


def test_an_audit_waits_for_weights_that_the_host_updates(warm_ranks: Warm) -> None:
    # One device computed with memory that had no weights yet, and the plan was refused.
    plan = "data=2 update=last-backward offload=optimizer"
    assert warm_ranks(2).run(audited_while_the_host_updates, plan)[0] == ["gradients: held"] * 4


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
    assert "The loss does not add up over samples" in first[0]
    assert first == second
    assert first[1] == 1


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("plan", ["data=2", "data=2 zero=3", "pipeline=2 microbatches=2"])
def test_every_rank_is_told(warm_ranks: Warm, plan: str) -> None:
    ranks = warm_ranks(2)
    for model, loss, samples, says in (
        (softmax_model, mean_loss, 8, "The model mixes samples"),
        (plain, weighted_loss, 8, "The loss does not add up"),
        (softmax_model, mean_loss, 2, "The model mixes samples"),  # one sample for each replica
        (plain, mean_loss, 8, "gradients: held"),
        *([(normalised, mean_loss, 8, "gradients: held")] if "data" in plan else []),
    ):
        first, second = ranks.run(refused_on, plan, model, loss, samples)
        assert says in first
        assert first == second


@pytest.mark.parametrize(("most", "place"), [(8, 7), (4, 3)])
def test_a_branch_of_one_sample_is_found_among_all_or_among_those_that_one_device_takes(
    most: int, place: int
) -> None:
    class Branching(Mixing):
        def forward(self, x: Tensor) -> Tensor:
            assert len(x) <= most, "too large for one device"
            output: Tensor = super().forward(x)
            return output - output.mean(0) if bool((x[:, 0] == 0.125).any()) else output

    engine = engine_of(Branching(torch.tanh), "microbatches=4")
    for step in range(4):
        engine.step(batch(step))
    inputs, targets = batch(4)
    inputs[place, 0] = 0.125
    engine.step((inputs, targets))
    with pytest.raises(UserError, match="would not train as on one device"):
        engine.step(batch(5))
