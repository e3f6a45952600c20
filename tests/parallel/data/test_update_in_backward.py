"""update=backward and last-backward, in one process: what a step is, what it refuses, and what it keeps."""

import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import echelon
from echelon.errors import UserError
from tests.cases import adamw, mean_loss, sgd, vectors
from tests.instrumented import accept

Make = Callable[[Any], torch.optim.Optimizer]

WIDE = 64


class Layers(nn.Module):
    """Six layers, each a unit, of which the second is the largest; the fourth and fifth share a bias."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [6, WIDE, 2 * WIDE, WIDE, WIDE, WIDE, 5]
        self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.blocks[4].bias = self.blocks[3].bias  # type: ignore[union-attr]
        self.unused = nn.Linear(3, 3)

    def layers(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def make_engine(
    plan: str,
    model: nn.Module | None = None,
    make: Make = adamw,
    loss: Callable[[Any, Any], Any] = mean_loss,
    **options: Any,
) -> echelon.Engine:
    torch.manual_seed(0)
    return echelon.parallelize(model or Layers(), plan, optimizer=make, loss=loss, **options)


def states(engine: echelon.Engine) -> dict[str, Tensor]:
    """Weights and optimizer state."""
    weights = engine.full_state_dict()
    state = engine.full_optimizer_state()
    return weights | {f"{n} {key}": value for n, each in state.items() for key, value in each.items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


def decayed(parameters: Any) -> torch.optim.Optimizer:
    """Two groups, each with options of its own."""
    both = list(parameters)
    matrices, vectors = [p for p in both if p.dim() > 1], [p for p in both if p.dim() < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 1e-3}])


@pytest.mark.slow_cases("decayed", "sgd")
@pytest.mark.parametrize("make", [adamw, sgd, adafactor, decayed])
def test_a_step_is_that_of_update_step_bit_for_bit(make: Make) -> None:
    """Also with a schedule, and where a parameter gets no gradient."""
    results = []
    for plan in ("update=step", "update=backward"):
        with make_engine(plan, make=make, schedule=lambda step: 1 / (step + 1)) as engine:
            norms = [engine.step(vectors(step)).grad_norm for step in range(3)]
            results.append((norms, states(engine)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert_same(results[0][1], results[1][1])


def test_several_microbatches_add_up_before_the_last_updates() -> None:
    results = []
    for plan in ("microbatches=3", "microbatches=3 update=last-backward"):
        with make_engine(plan) as engine:
            for step in range(3):
                engine.step(vectors(step))
            results.append(states(engine))
    assert_same(*results)


def test_one_unit_has_gradients_at_a_time() -> None:
    """The largest: measured from storages when each unit is complete."""
    largest = (WIDE + 1) * 2 * WIDE * 4
    peaks = {}
    for update in ("step", "backward"):
        with make_engine(f"update={update}") as engine:
            for step in range(2):
                engine.step(vectors(step))
            peaks[update] = engine.memory().peak["gradients"]
            now = engine.memory().now["gradients"]
    assert peaks["backward"] == largest, "and none of another"
    assert peaks["step"] > 3 * largest
    assert now == 0


@pytest.mark.parametrize("plan", ["", "recompute=full", "offload=parameters", "offload=optimizer"])
def test_a_first_step_keeps_the_gradients_of_no_more_units_than_others(plan: str) -> None:
    """By storages that are alive, whoever holds them: also while it is rehearsed."""
    model = Layers()
    most: list[int] = []
    seen: list[weakref.ref[Any]] = []

    def look(parameter: Tensor) -> None:
        if parameter.grad is not None:
            seen.append(weakref.ref(parameter.grad.untyped_storage()))
        alive = {s._cdata: s.nbytes() for s in (ref() for ref in seen) if s is not None}
        most[-1] = max(most[-1], sum(alive.values()))

    def watch() -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(look)

    watch()  # before the engine's hooks, which use and free gradients; and after them
    with make_engine(f"update=backward {plan}", model, audit="off") as engine:
        watch()
        accept(engine)
        for step in range(3):
            most.append(0)
            seen.clear()
            engine.step(vectors(step))
    assert most[0] == most[1] == most[2] > 0


def test_a_unit_is_updated_before_the_backward_pass_reaches_the_next() -> None:
    model = Layers()
    with make_engine("update=backward", model, audit="off") as engine:
        engine.step(vectors(0))
        before = [block.weight.clone() for block in model.blocks]
        updated: list[list[bool]] = []

        def note(_: object) -> None:
            pairs = zip(model.blocks, before, strict=True)
            updated.append([not torch.equal(block.weight, weight) for block, weight in pairs])

        model.blocks[0].bias.register_hook(note)
        accept(engine)
        engine.step(vectors(1))
    # The unit of blocks 3 and 4 owns the bias that both use.
    assert updated == [[False, True, True, True, True, True]]


class Reads(nn.Module):
    """Its first layer multiplies by the weight of its last one, which torch does not know to be the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 5)

    def layers(self) -> list[nn.Module]:
        return [self.first, self.last]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(F.linear(self.first(x), self.last.weight.detach())))


def test_a_weight_that_is_needed_after_its_update_is_an_error_and_changes_nothing() -> None:
    model = Reads()
    with make_engine("update=backward", model) as engine:
        before = engine.full_state_dict()
        with pytest.raises(RuntimeError, match=r"in.?place"):
            engine.step(vectors(0))
        assert_same(before, engine.full_state_dict())


# What is refused, before a weight changes.


def test_clip_is_refused() -> None:
    with pytest.raises(UserError, match=r"clip=1.0 with update=backward: the norm .* drop clip, or"):
        make_engine("update=backward", clip=1.0)


class Elsewhere(torch.optim.SGD):
    """Nobody knows what it does with some of its parameters."""


def hooked(parameters: Any) -> torch.optim.Optimizer:
    optimizer = adamw(parameters)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize("make", [hooked, lambda parameters: Elsewhere(parameters, lr=0.1)])
def test_an_optimizer_that_must_be_called_once_is_refused(make: Make) -> None:
    with pytest.raises(UserError, match=r"is called once for each unit.*update=step"):
        make_engine("update=backward", make=make)


def test_a_hook_that_needs_the_whole_gradient_is_found_before_the_first_update() -> None:
    model = Layers()
    model.blocks[2].weight.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
    with make_engine("microbatches=2 update=last-backward", model) as engine:
        before = engine.full_state_dict()
        with pytest.raises(UserError, match=r"gradients differ .*1 in all: blocks\.2\.weight .*a hook"):
            engine.step(vectors(0))
        assert_same(before, engine.full_state_dict())


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output, target, reduction="sum"), (target != -100).sum()


def weighted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A count that targets alone do not tell."""
    weights = torch.arange(1.0, 6.0)
    return F.cross_entropy(output, target, weights, reduction="sum"), weights[target].sum()


def test_a_count_that_is_not_known_before_is_refused() -> None:
    with make_engine("microbatches=2 update=last-backward", loss=weighted) as engine:
        before = engine.full_state_dict()
        with pytest.raises(UserError, match=r"the loss counts 3\d, and the batch has 12 samples, 12 targets"):
            engine.step(vectors(0))
        assert_same(before, engine.full_state_dict())


def test_several_losses_after_a_single_one_that_counted_something_else_are_refused() -> None:
    with make_engine("microbatches=2 update=last-backward", loss=weighted, audit="off") as engine:
        engine.step(tuple(each[:1] for each in vectors(0)))
        before = states(engine)
        with pytest.raises(UserError, match="earlier losses counted something else, and the batch has 12"):
            engine.step(vectors(1))
        assert_same(before, states(engine))


def test_a_single_loss_may_count_anything() -> None:
    results = []
    for plan in ("update=step", "update=backward"):
        with make_engine(plan, loss=weighted) as engine:
            for step in range(2):
                engine.step(vectors(step))
            results.append(states(engine))
    assert_same(*results)


def sometimes_all(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Counts ignored targets too, which only shows when there are any."""
    return F.cross_entropy(output, target, reduction="sum"), len(target)


def ignoring(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = vectors(step)
    targets[3] = -100
    return inputs, targets


@pytest.mark.parametrize("loss", [sometimes_all, counted])
def test_what_a_loss_counts_may_show_in_a_later_step(loss: Callable[[Any, Any], Any]) -> None:
    """The first batch has fitted all three, and one of them was guessed: a valid training was refused."""
    results = []
    for plan in ("microbatches=2", "microbatches=2 update=last-backward"):
        with make_engine(plan, make=sgd, loss=loss) as engine:
            for batch in (vectors(0), ignoring(1), vectors(2), ignoring(3)):
                engine.step(batch)
            results.append(states(engine))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("first", [vectors, ignoring], ids=["several fit", "one fits"])
def test_a_count_that_changes_its_meaning_is_refused_before_the_backward_pass(
    first: Callable[[int], tuple[Tensor, Tensor]],
) -> None:
    losses: list[Callable[[Any, Any], Any]] = [counted]

    def loss(output: Tensor, target: Tensor) -> Any:
        return losses[0](output, target)

    with make_engine("microbatches=2 update=last-backward", loss=loss) as engine:
        engine.step(first(0))
        engine.step(ignoring(1))
        before = states(engine)
        losses[0] = sometimes_all
        with pytest.raises(UserError, match=r"counts 6 for targets .* would have counted 5"):
            engine.step(ignoring(2))
        assert_same(before, states(engine))
        losses[0] = counted
        engine.step(vectors(3))


def of_squares(output: Tensor, target: Tensor) -> Tensor:
    """A mean over samples, for which -100 is a target as any other."""
    return (output[:, 0] - target).square().mean()


def test_a_mean_counts_samples_whatever_their_targets() -> None:
    """Where all were -100 the step was taken for one without samples."""
    results = []
    for plan in ("microbatches=2", "microbatches=2 update=last-backward"):
        with make_engine(plan, make=sgd, loss=of_squares) as engine:
            engine.step(vectors(0))
            inputs, targets = vectors(1)
            engine.step((inputs, torch.full_like(targets, -100)))
            results.append(states(engine))
    assert_same(*results)


@pytest.mark.parametrize("plan", ["update=backward", "microbatches=2 update=last-backward"])
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later"])
def test_a_step_without_targets_changes_nothing(plan: str, first: bool) -> None:
    """AdamW would decay weights also for gradients of zero."""
    with make_engine(plan, loss=counted) as engine:
        if not first:
            engine.step(vectors(0))
        before = states(engine)
        inputs, targets = vectors(1)
        with pytest.raises(UserError, match="no replica had a sample"):
            engine.step((inputs, torch.full_like(targets, -100)))
        assert_same(before, states(engine))
        engine.step(vectors(2))
        assert not torch.equal(before["blocks.0.weight"], states(engine)["blocks.0.weight"])


class Noisy(nn.Module):
    """Draws by itself, counts its calls, and keeps statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.last(self.norm(self.first(x)) + torch.rand(len(x), 8))


def test_the_rehearsal_of_the_first_step_leaves_no_trace() -> None:
    results = []
    for plan in ("update=step", "update=backward"):
        torch.manual_seed(0)
        model = Noisy()
        with make_engine(plan, model, audit="off", seed=None, smallest_unit=0) as engine:
            torch.manual_seed(1)
            for step in range(2):
                engine.step(vectors(step))
            results.append((states(engine), model.calls))
    assert_same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] == 2


class Detached(nn.Module):
    """Adds a weight of another layer, of which torch saves nothing."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)
        self._others = [other]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.own(x + self._others[0].weight.detach().sum(0)))


def detached(*, zeros: bool = False) -> nn.Module:
    """The weight is of the layer after the next: ranks have summed its gradient by the second run."""
    read = nn.Linear(8, 8)
    if zeros:
        nn.init.zeros_(read.weight)
    return nn.Sequential(nn.Linear(6, 8), Detached(read), nn.Linear(8, 8), read, nn.Tanh(), nn.Linear(8, 5))


@pytest.mark.parametrize("recompute", ["full", "sqrt"])
@pytest.mark.parametrize("zeros", [False, True])
def test_a_second_run_that_reads_an_updated_weight_is_refused_and_changes_nothing(
    recompute: str, zeros: bool
) -> None:
    """It trained with the new weight: a rehearsal that changes no weight saw no difference. Also in a second
    attempt, for which the check was closed."""
    model = detached(zeros=zeros)
    with make_engine(f"update=backward recompute={recompute}", model, audit="off") as engine:
        before = states(engine)
        for _ in range(2):
            with pytest.raises(UserError, match=r"layer 1 \(Detached\) returned .* update=backward"):
                engine.step(vectors(0))
            assert_same(before, states(engine))


def test_a_second_run_that_reads_a_weight_before_its_update_is_equal() -> None:
    """Of a layer before it, whose backward pass comes later."""
    results = []
    for update in ("step", "backward"):
        first = nn.Linear(8, 8)
        model = nn.Sequential(nn.Linear(6, 8), first, nn.Tanh(), Detached(first), nn.Linear(8, 5))
        with make_engine(f"update={update} recompute=full", model) as engine:
            for step in range(2):
                engine.step(vectors(step))
            results.append(states(engine))
    assert_same(*results)


class Raising(nn.Module):
    """Its backward pass raises when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.raises = nn.Linear(6, 8), False

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        if self.raises:
            output.register_hook(self._raise)
        return output

    def _raise(self, _: Tensor) -> None:
        raise ValueError("in the backward pass")


@pytest.mark.parametrize(("update", "goes_on"), [("step", True), ("backward", False)])
def test_nobody_goes_on_after_a_step_that_was_half_applied(update: str, goes_on: bool) -> None:
    first = Raising()
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(8, 5))
    with make_engine(f"update={update}", model, audit="off") as engine:
        first.raises = True
        with pytest.raises(ValueError, match="in the backward pass"):
            engine.step(vectors(0))  # in its rehearsal
        first.raises = False
        engine.step(vectors(0))
        first.raises = True
        with pytest.raises(ValueError, match="in the backward pass"):
            engine.step(vectors(1))
        first.raises = False
        if goes_on:
            engine.step(vectors(2))
        else:
            with pytest.raises(UserError, match="some weights are those of after the step"):
                engine.step(vectors(2))


def test_an_evaluation_that_fails_between_steps_breaks_nothing() -> None:
    with make_engine("update=backward") as engine:
        engine.step(vectors(0))
        with pytest.raises(RuntimeError):
            engine.evaluate((torch.randn(2, 3), torch.zeros(2, dtype=torch.int64)))
        engine.step(vectors(1))


class Sparse(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(5, 8, sparse=True), nn.Linear(8, 8), nn.Linear(8, 5))


def tokens() -> tuple[Tensor, Tensor]:
    return torch.arange(6) % 5, torch.arange(6) % 5


@pytest.mark.parametrize(
    "make",
    [adamw, echelon.optim.Adafactor, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1)],
    ids=["AdamW", "Adafactor", "SGD with decay"],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 masters=false"])
def test_a_gradient_that_the_optimizer_does_not_take_is_found_before_the_first_update(
    make: Make, precision: str
) -> None:
    """The optimizer raised when the units before it were updated."""
    with make_engine(f"update=backward precision={precision}", Sparse(), make) as engine:
        before = states(engine)
        with pytest.raises(UserError, match=r"sparse gradient.*sparse=False"):
            engine.step(tokens())
        assert_same(before, states(engine))


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_a_gradient_that_is_tried_on_a_copy_leaves_no_trace() -> None:
    results = []
    for update in ("step", "backward"):
        with make_engine(f"update={update}", Sparse(), momentum) as engine:
            for _ in range(2):
                engine.step(tokens())
            results.append(dict(engine.module.state_dict()))
            assert len(engine.optimizer.state) == len(results[0])
    assert_same(*results)


def test_a_hook_that_is_added_later_is_refused() -> None:
    with make_engine("update=backward") as engine:
        engine.step(vectors(0))
        before = states(engine)
        hook = engine.optimizer.register_step_post_hook(lambda *_: None)
        with pytest.raises(UserError, match=r"is called once for each unit.*update=step"):
            engine.step(vectors(1))
        assert_same(before, states(engine))
        hook.remove()
        engine.step(vectors(1))
