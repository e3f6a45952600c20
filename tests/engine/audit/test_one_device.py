"""Models that do not fit rank 0 are audited all the same: weights and gradients come there one by one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import echelon
from echelon.engine import Engine
from echelon.engine.audit import one_device
from echelon.engine.audit.gradient_comparison import share_gradients
from echelon.engine.audit.one_device import WeightStream
from echelon.engine.audit.plain_form import layer_sizes
from echelon.errors import UserError
from echelon.launching import RankFailed, Ranks
from tests.cases import mean_loss, sgd

Warm = Callable[[int], Ranks]
WIDTH, CLASSES = 32, 5
MEMORY = 90_000  # bytes, of which an audit takes half: a layer with its gradient, and not all of them


class Record(NamedTuple):
    """Of rank 0: bytes of weights in memory after each that came, and how many gradients, before each."""

    held: list[int]
    gradients: list[int]


@contextmanager
def small_memory(num_bytes: int = MEMORY) -> Iterator[Record]:
    record, fill, share = Record([], []), WeightStream._fill, one_device.share_gradients
    storages: list[StorageWeakRef] = []

    def counted_fill(self: WeightStream, name: str) -> None:
        fill(self, name)
        record.held.append(self.num_bytes + self.tensors[name].nbytes)  # and what it was copied from

    def counted_share(gradients: dict[str, Tensor], *arguments: Any) -> None:
        if len(gradients) == 1:
            record.gradients.append(sum(not storage.expired() for storage in storages))
            storages.extend(StorageWeakRef(each.untyped_storage()) for each in gradients.values())
        share(gradients, *arguments)

    with (
        patch.object(one_device, "free_bytes", lambda _: num_bytes),
        patch.object(WeightStream, "_fill", counted_fill),
        patch.object(one_device, "share_gradients", counted_share),
    ):
        yield record


class Applied(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.function(x)
        return output


def deep(middle: nn.Module | None = None) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(7)]
    return nn.Sequential(*layers[:4], middle or nn.Identity(), *layers[4:], nn.Linear(WIDTH, CLASSES))


def dropping() -> nn.Module:
    return deep(nn.Dropout(0.5))


def batch(step: int, samples: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(samples, WIDTH, generator=generator)
    return inputs, torch.randint(0, CLASSES, (samples,), generator=generator)


def engine_of(model: nn.Module, plan: str, loss: Any = mean_loss, **options: Any) -> Engine:
    return echelon.parallelize(model, f"{plan} precision=fp64", optimizer=sgd, loss=loss, **options)


class Trained(NamedTuple):
    """Of a rank, after two steps."""

    audit: list[str]
    losses: list[float]
    state: dict[str, Tensor]
    random: Tensor
    record: Record
    largest_layer: int


def train(plan: str, audit: str, make: Callable[[], nn.Module] = dropping) -> Trained:
    torch.manual_seed(0)
    model = make().double()
    largest = max(layer_sizes({name: weight.nbytes for name, weight in model.named_parameters()}))
    engine = engine_of(model, plan, audit=audit)
    torch.manual_seed(engine.replica)
    with small_memory() as record:
        losses = [engine.step(engine.local(batch(step))).loss for step in range(2)]
    random = torch.get_rng_state()
    return Trained(list(map(str, engine.audit)), losses, engine.full_state_dict(), random, record, largest)


PLANS = ["data=2 zero=3", "pipeline=2 microbatches=2", "data=2 zero=1", "data=2 offload=parameters"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "plan", [*PLANS, pytest.param("data=4 zero=3 microbatches=2", marks=pytest.mark.slow)]
)
def test_a_model_that_does_not_fit_is_compared_in_the_memory_of_a_layer(warm_ranks: Warm, plan: str) -> None:
    """And leaves no trace: weights, losses and generators are those of a training without an audit."""
    ranks = warm_ranks(echelon.Plan.parse(plan).ranks)
    for one, other in zip(*(ranks.run(train, plan, audit) for audit in ("sampled", "off")), strict=True):
        assert one.audit == ["finite weights: held", "gradients: held"]
        assert one.losses == other.losses
        assert all(torch.equal(value, other.state[name]) for name, value in one.state.items())
        assert torch.equal(one.random, other.random)
        if one.record.gradients:  # on rank 0
            assert len(one.record.gradients) == 2 * len(one.state)  # in each of two steps
            assert max(one.record.gradients) <= 1
            assert max(one.record.held, default=0) < 2 * one.largest_layer
            assert bool(one.record.held) == (plan != "data=2 zero=1")


def say(plan: str, make: Callable[[], nn.Module], loss: Any = mean_loss) -> list[str]:
    """In a rank: what the audit says of a step, of a model that fits and of the same that does not."""
    said = []
    for num_bytes in (2**40, MEMORY):
        torch.manual_seed(0)
        engine = engine_of(make().double(), plan, loss)
        with small_memory(num_bytes) as record:
            try:
                engine.step(engine.local(batch(0)))
                said.append("; ".join(map(str, engine.audit)))
            except UserError as error:
                assert engine.steps == 0
                said.append(str(error))
        assert bool(record.gradients) == (num_bytes == MEMORY and torch.distributed.get_rank() == 0)
        if engine.steps:
            engine.step(engine.local(batch(1)))  # nothing is left of an audit that failed
    return said


class Limited(nn.Module):
    """Takes `most` samples, and mixes them where one has a mark."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.body, self.most = deep(), most

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) <= self.most, "too large for one device"
        output: Tensor = self.body(x)
        return output - output.mean(0) if bool((x[:, 0] == 0.125).any()) else output


def take_another_way(most: int, place: int) -> str:
    torch.manual_seed(0)
    engine = engine_of(Limited(most).double(), "data=2 zero=3 microbatches=4")
    with small_memory():
        for step in range(4):
            engine.step(engine.local(batch(step)))
        inputs, targets = batch(4)
        inputs[place, 0] = 0.125
        engine.step(engine.local((inputs, targets)))
        with pytest.raises(UserError) as caught:
            engine.step(engine.local(batch(5)))
    return str(caught.value)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("most", "place"), [(16, 15), (8, 1)])
def test_a_batch_that_took_another_way_is_compared_as_far_as_one_device_takes_it(
    warm_ranks: Warm, most: int, place: int
) -> None:
    first, second = warm_ranks(2).run(take_another_way, most, place)
    assert "would not train as on one device" in first
    assert first == second


def tied_llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=6,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config)


def train_llama(plan: str) -> tuple[list[str], Record]:
    torch.manual_seed(0)
    engine = engine_of(tied_llama().double(), plan, loss=None)
    tokens = torch.randint(0, 64, (8, 7), generator=torch.Generator().manual_seed(1))
    with small_memory() as record:
        engine.step(engine.local({"input_ids": tokens, "labels": tokens}))
    return list(map(str, engine.audit)), record


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("plan", [PLANS[0], pytest.param(PLANS[1], marks=pytest.mark.slow), "tensor=2"])
def test_tied_weights_of_a_llama(warm_ranks: Warm, plan: str) -> None:
    results = warm_ranks(2).run(train_llama, plan)
    for audit, _ in results:
        assert audit == ["finite weights: held", "gradients: held"]
    record = results[0][1]
    assert len(record.gradients) == 1 + 6 * 9 + 1  # the tied one once
    assert 0 < max(record.held) < 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32 + 2 * 16) * 8


def test_one_layer_that_does_not_fit_is_said(warm_ranks: Warm) -> None:
    for audit in warm_ranks(2).run(too_large, "data=2 zero=3"):
        assert audit[1] == (
            "gradients: skipped (weights and gradients of one layer take 32.2 KiB on rank 0, which has "
            "58.6 KiB free, half of it for the audit)"
        )


def too_large(plan: str) -> list[str]:
    engine = engine_of(deep().double(), plan)
    with small_memory(60_000):
        engine.step(engine.local(batch(0)))
    return list(map(str, engine.audit))


def fail_while_serving() -> None:
    engine = engine_of(deep().double(), "data=2 zero=3", audit="first")
    with small_memory(), patch.object(one_device, "share_gradients", _fail_on_rank_1):
        engine.step(engine.local(batch(0)))


def _fail_on_rank_1(*arguments: Any) -> None:
    if torch.distributed.get_rank() == 1:
        raise MemoryError("no memory for a gradient")
    share_gradients(*arguments)


def test_a_rank_that_fails_while_it_serves_ends_with_its_own_error() -> None:
    """It does not go on to something else, where it would meet rank 0's next request."""
    with pytest.raises(RankFailed, match="rank 1 raised MemoryError: no memory for a gradient"):
        echelon.launch(fail_while_serving, 2)
