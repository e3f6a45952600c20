"""Models without memory: the same initial weights whatever the plan, and never whole on any rank."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.engine import Engine, parallelize
from echelon.engine.start import fill
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import build, cross_entropy, preset
from echelon.nn.initialization.initial_values import WeightSource
from echelon.plan import Plan
from echelon.state.ownership import OwnedSlice, whole_slice
from tests.peak_memory import PeakMemory

MESSAGES = 8 * 2**20  # what links between ranks of one host take
CONFIG = dataclasses.replace(preset("gpt-tiny"), layers=3, vocab=131, width=32, heads=4)


class WithBuffers(nn.Module):
    """Statistics, a table that no state dict has, a tensor that is no buffer, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64))
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.last = nn.Linear(64, 1)
        self.register_buffer("table", torch.linspace(0, 1, 64), persistent=False)
        self.offset = torch.full((64,), 0.25)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.frozen(self.first(x)) * self.table + self.offset)
        return result


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def gpt() -> nn.Module:
    torch.manual_seed(7)
    return echelon.deferred(lambda: build(CONFIG))


def with_buffers() -> nn.Module:
    torch.manual_seed(7)
    return echelon.deferred(WithBuffers)


def text() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, CONFIG.vocab, (4, 17), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def numbers() -> tuple[Tensor, Tensor]:
    drawn = torch.randn(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return drawn[:, :8], drawn[:, 8:]


class Kind(NamedTuple):
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], object]


KINDS = {"gpt": Kind(gpt, text, cross_entropy), "buffers": Kind(with_buffers, numbers, square)}


def engine_of(kind: str, plan: str) -> Engine:
    return parallelize(
        KINDS[kind].model(),
        f"{plan} precision=fp64",
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        loss=KINDS[kind].loss,  # type: ignore[arg-type]
    )


class Started(NamedTuple):
    """The weights at the start, the losses of three steps, and the weights after them."""

    weights: dict[str, Tensor]
    losses: list[float]
    after: dict[str, Tensor]


def start(kind: str, plans: tuple[str, ...]) -> list[Started]:
    results = []
    for plan in plans:
        with engine_of(kind, plan) as engine:
            weights = engine.full_state_dict()
            batch = KINDS[kind].batch()
            losses = [engine.step(engine.local(batch)).loss for _ in range(3)]
            results.append(Started(weights, losses, engine.full_state_dict()))
    return results


TWO = ("data=2", "data=2 zero=1", "data=2 zero=2", "data=2 zero=3", "tensor=2", "pipeline=2 microbatches=2")
SERVERS = ("data=2 sync=parameter-server", "data=2 sync=async staleness=0")
FOUR = (
    "data=2 tensor=2 zero=3",
    "data=2 pipeline=2 zero=3 microbatches=2",
    "tensor=2 context=2 sequence=true",
)
CASES = [
    ("gpt", 2, (*TWO, *SERVERS)),
    ("gpt", 4, FOUR),
    ("buffers", 2, ("data=2 zero=1", "data=2 zero=3")),
]


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases("gpt-4")
@pytest.mark.parametrize(("kind", "ranks", "plans"), CASES, ids=["gpt-2", "gpt-4", "buffers-2"])
def test_every_plan_starts_with_the_same_weights(
    kind: str, ranks: int, plans: tuple[str, ...], warm_ranks: Callable[[int], Ranks]
) -> None:
    (alone,) = start(kind, ("data=1",))
    for results in warm_ranks(ranks).run(start, kind, plans):
        for plan, result in zip(plans, results, strict=True):
            for name, weight in alone.weights.items():
                assert torch.equal(result.weights[name], weight), f"{plan}: {name}"
                if kind == "gpt":  # statistics of batches are those of each replica
                    assert torch.allclose(result.after[name], alone.after[name], atol=1e-9), f"{plan}: {name}"
            if kind == "gpt":
                assert result.losses == pytest.approx(alone.losses, abs=1e-9), plan


def test_one_device_has_the_values_of_the_recording() -> None:
    values = WeightSource(gpt(), torch.device("cpu"))
    with engine_of("gpt", "data=1") as engine:
        for name, weight in engine.full_state_dict().items():
            assert torch.equal(weight, values.tensor(name).double()), name
        assert not any(parameter.is_meta for parameter in engine.module.parameters())


class Padded:
    """A sharing of one weight, in memory that has a row more; what is in it at first may be anything."""

    def __init__(self) -> None:
        self.memory = torch.full((4, 2), float("nan"))

    def first_weights(self) -> list[OwnedSlice]:
        return [OwnedSlice(whole_slice("weight", self.memory), self.memory)]

    def share_first_weights(self) -> None:
        pass


def test_padding_is_zeros() -> None:
    model, sharing, device = echelon.deferred(lambda: nn.Linear(2, 3)), Padded(), torch.device("cpu")

    def in_whole(held: OwnedSlice) -> list[OwnedSlice]:
        return [OwnedSlice(whole_slice("weight", model.weight), held.tensor[:3])]

    sharings: list[Any] = [sharing]
    fill(model, Plan.parse("tensor=2"), sharings, in_whole, WeightSource(model, device))
    assert torch.equal(sharing.memory[:3], WeightSource(model, device).tensor("weight"))
    assert not sharing.memory[3].any()


def test_buffers_and_plain_tensors_have_values_and_names_stay() -> None:
    with engine_of("buffers", "data=1") as engine:
        model = engine.module
        assert torch.equal(model.get_buffer("table"), torch.linspace(0, 1, 64).double())
        assert torch.equal(vars(model)["offset"], torch.full((64,), 0.25))
        assert list(engine.full_state_dict()) == list(WithBuffers().state_dict())


def start_in_little_memory(plan: str) -> tuple[int, int, int]:
    """The peak while an engine starts, what this rank owns then, and its largest unit; bytes."""
    config = dataclasses.replace(CONFIG, layers=8, width=256)
    model = echelon.deferred(lambda: build(config))
    unit = max(sum(p.numel() for p in layer.parameters()) for layer in model.layers()) * 8
    with PeakMemory() as memory:
        engine = parallelize(model, f"{plan} precision=fp64", optimizer=torch.optim.SGD, loss=cross_entropy)
    with engine:
        owned = sum(each.tensor.nbytes for each in engine.owned())
    assert all(p is None or p.device.type != "meta" for p in model.parameters()), "what is here has memory"
    return memory.peak, owned, unit


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases("data=4 zero=3")
@pytest.mark.parametrize("plan", ["data=4 zero=3", "tensor=2 pipeline=2", "data=2 pipeline=2 zero=3"])
def test_no_rank_ever_holds_more_than_its_part_and_two_units(
    plan: str, warm_ranks: Callable[[int], Ranks]
) -> None:
    for peak, owned, unit in warm_ranks(4).run(start_in_little_memory, plan):
        assert peak <= 1.25 * owned + 2 * unit + MESSAGES < 4 * owned


class Recurrent(nn.Module):
    """Weak references to weights, a hook on one, a buffer that two modules share, and numbers of its own."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 4, batch_first=True)
        self.head = nn.Linear(4, 1)
        self.head.bias.register_hook(torch.zeros_like)
        self.table = nn.Parameter(torch.full((1,), number, device="cpu"))
        for module in (self.lstm, self.head):
            module.register_buffer("shared", torch.ones(1) if module is self.lstm else self.lstm.shared)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.lstm(x[:, None])[0][:, 0]) * self.table * self.head.shared
        return result


def own_number() -> tuple[float, bool, bool]:
    rank = torch.distributed.get_rank()
    model = echelon.deferred(lambda: Recurrent(2.0 + rank))
    with parallelize(model, "data=2 precision=fp64", optimizer=torch.optim.SGD, loss=square) as engine:
        number, bias = float(model.table), model.head.bias.detach().clone()
        engine.step(engine.local(numbers()))
        return number, torch.equal(bias, model.head.bias), model.lstm.shared is model.head.shared


def test_values_of_rank_0_hooks_and_shared_buffers_reach_every_rank(
    warm_ranks: Callable[[int], Ranks],
) -> None:
    assert warm_ranks(2).run(own_number) == [(2.0, True, True)] * 2


class Filled(nn.Linear):
    def __init__(self, number: float) -> None:
        super().__init__(2, 2)
        nn.init.constant_(self.weight, number)


def differing_models() -> list[str]:
    """What ranks say that have built models differently."""
    rank, said = torch.distributed.get_rank(), []
    for model in (build(CONFIG) if rank == 0 else gpt(), echelon.deferred(lambda: Filled(rank))):
        with pytest.raises(UserError) as refusal:
            parallelize(model, "data=2", optimizer=torch.optim.SGD, loss=cross_entropy)
        said.append(refusal.value.title)
    return said


def test_ranks_with_and_without_values_are_refused(warm_ranks: Callable[[int], Ranks]) -> None:
    first, second = warm_ranks(2).run(differing_models)
    assert first == second
    assert "rank 0 has a model with values, and rank 1 has a model without values" in first[0]
    assert "rank 0 has fill_.Scalar(torch.float32 (2, 2), 0)" in first[1]


def test_a_start_that_fails_leaves_no_model_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    model = gpt()
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules[parallelize.__module__], "fill", fail)
        with pytest.raises(MemoryError):
            parallelize(model, "data=1", optimizer=torch.optim.SGD, loss=cross_entropy)
    with pytest.raises(UserError, match="build the model again"):
        parallelize(model, "data=1", optimizer=torch.optim.SGD, loss=cross_entropy)


def close_twice() -> tuple[bool, int]:
    """Whether the model is whole after a close, and how many tensors come to this rank."""
    engine = engine_of("gpt", "data=2 zero=3")
    num_tensors = len(engine.full_state_dict(to="rank0"))
    engine.close()
    with pytest.raises(UserError, match="split over ranks"):
        parallelize(engine.module, "data=2", optimizer=torch.optim.SGD, loss=cross_entropy)
    whole = engine_of("gpt", "data=2 zero=3")
    expected = whole.full_state_dict()
    whole.close(restore=True)
    found = whole.module.state_dict()
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items()), num_tensors


def test_a_deferred_model_stays_in_parts_unless_asked_for(warm_ranks: Callable[[int], Ranks]) -> None:
    num_tensors = len(build(CONFIG).state_dict())
    assert warm_ranks(2).run(close_twice) == [(True, num_tensors), (True, 0)]


def test_what_cannot_start_is_refused_before_memory_is_taken() -> None:
    with torch.device("meta"):
        unknown = WithBuffers()
    with pytest.raises(UserError) as refusal:
        parallelize(unknown, "data=1", optimizer=torch.optim.SGD, loss=square)
    assert [error.partition(":")[0] for error in refusal.value.errors] == ["table", "offset"]
    assert all(parameter.is_meta for parameter in unknown.parameters())
    with pytest.raises(UserError, match="pipeline=auto measures the layers of a model"):
        parallelize(
            gpt(), "pipeline=auto", optimizer=torch.optim.SGD, loss=cross_entropy, sample_batch=text()
        )
    with pytest.raises(UserError, match="to='rank0'"), engine_of("gpt", "data=1") as engine:
        engine.full_state_dict(to="rank 0")
