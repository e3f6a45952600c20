"""A step on a GPU waits for nothing: torch raises where the host would wait for the device.

One process runs the plans of one rank. Two or four ranks run the others, over real NCCL on one device: each
is a host of its own to NCCL. Over Gloo every message waits by its nature.
"""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.engine import Engine
from echelon.launching import Ranks
from echelon.models import ModelConfig, build, cross_entropy
from echelon.update.precision.loss_scaling import ScaleState
from tests.gpu.nccl import environment
from tests.gpu.waiting import waiting_raises

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = ModelConfig("gpt", 2, 64, 4, vocab=128, sequence=32)
WARM_UP = 4  # steps that make state, agree on orders and measure memory

SINGLE = [
    "data=1",
    "data=1 microbatches=2",
    "data=1 precision=bf16",
    "data=1 precision=bf16 microbatches=2",
    "data=1 precision=fp16",
    "data=1 precision=fp16 microbatches=2",
    "data=1 precision=fp64",
    "data=1 update=backward",
    "data=1 precision=bf16 masters=false",
    "data=1 precision=bf16 masters=false microbatches=2 update=last-backward",
    "data=1 precision=fp16 microbatches=2 recompute=full",
    "data=1 precision=bf16 recompute=full",
    "data=1 precision=bf16 recompute=sqrt",
    "data=1 precision=bf16 recompute=selective",
    "data=1 precision=bf16 recompute=budget:8MiB",
    "data=1 precision=bf16 recompute=full contiguous=true",
    "data=1 precision=bf16 update=backward",
    "data=1 precision=bf16 update=backward masters=false",
    "data=1 precision=bf16 offload=parameters",
    "data=1 precision=bf16 update=backward masters=false recompute=full offload=parameters",
]
RANKS = [
    "data=2",
    "data=2 zero=1 precision=bf16",
    "data=2 zero=2 microbatches=2",
    "data=2 zero=3 precision=bf16",
    "data=2 zero=3 precision=bf16 offload=parameters",
    "data=2 zero=1 precision=fp16",
    "tensor=2 precision=fp16",
    "pipeline=2 schedule=pipedream microbatches=4 precision=fp16",
    "tensor=2",
    "tensor=2 sequence=true",
    "context=2",
    "context=2 precision=bf16",
    "context=2 attention=all-to-all precision=bf16",
    "pipeline=2 microbatches=4",
    "pipeline=2 schedule=zero-bubble microbatches=4",
    "pipeline=2 schedule=pipedream microbatches=4",
    "data=2 update=backward",
    "data=2 zero=2 precision=bf16 masters=false update=backward",
    "data=2 zero=3 microbatches=2 update=last-backward",
    "pipeline=2 schedule=zero-bubble microbatches=4 update=last-backward",
    "data=2 zero=2 precision=fp16",
    "data=2 zero=3 precision=bf16 recompute=full",
    "data=2 zero=3 precision=bf16 recompute=selective update=backward masters=false",
    "tensor=2 recompute=full checkpoints=split precision=bf16",
    "pipeline=2 schedule=pipedream microbatches=4 precision=fp16",
    "pipeline=2 schedule=zero-bubble microbatches=4 recompute=full",
]


IN_GROUPS = [
    "data=4 zero=1 shard=2",
    "data=4 zero=2 shard=2 microbatches=2",
    "data=4 zero=3 shard=2 precision=bf16",
]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(CONFIG.vocab, (8, 33), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def steps_without_waiting(
    plan: str, optimizer: Callable[..., torch.optim.Optimizer] = adamw, dropout: float = 0.0
) -> list[float]:
    """The losses of three steps in which a wait of the host for the device raises."""
    torch.manual_seed(0)
    model = build(replace(CONFIG, dropout=dropout))
    clip = None if "pipedream" in plan or "update" in plan else 1.0
    engine: Engine = echelon.parallelize(model, plan, optimizer=optimizer, loss=cross_entropy, clip=clip)
    for step in range(WARM_UP):
        engine.step(engine.local(batch(step)))
    torch.cuda.synchronize()
    with waiting_raises():
        metrics = [engine.step(engine.local(batch(WARM_UP + step))) for step in range(3)]
    losses = [each.loss for each in metrics]
    assert all(each.seconds > 0 for each in metrics)
    engine.close(restore=False)
    return losses


@pytest.mark.parametrize("plan", SINGLE)
def test_a_step_of_one_rank_waits_for_nothing(plan: str) -> None:
    losses = steps_without_waiting(plan)
    assert len(losses) == 3


@pytest.fixture(scope="module")
def nccl() -> Iterator[Ranks]:
    with Ranks(2, backend="nccl", deadline=120.0, environment=environment) as ranks:
        yield ranks


def losses_or_error(plan: str, dropout: float) -> list[float] | str:
    """Where the host waited, the stack of it: all ranks wait at the same place, so none is left behind."""
    try:
        return steps_without_waiting(plan, dropout=dropout)
    except Exception:
        return traceback.format_exc()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("plan", RANKS)
def test_a_step_of_two_ranks_waits_for_nothing(nccl: Ranks, plan: str, dropout: float) -> None:
    first, second = nccl.run(losses_or_error, plan, dropout)
    assert isinstance(first, list), first
    assert first == second


@pytest.fixture(scope="module")
def nccl_of_four() -> Iterator[Ranks]:
    with Ranks(4, backend="nccl", deadline=120.0, environment=environment) as ranks:
        yield ranks


@pytest.mark.parametrize("plan", IN_GROUPS)
def test_a_step_of_sharding_groups_waits_for_nothing(nccl_of_four: Ranks, plan: str) -> None:
    first, *others = nccl_of_four.run(losses_or_error, plan, 0.0)
    assert isinstance(first, list), first
    assert others == [first] * 3


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_other_optimizers_with_fused_kernels_wait_for_nothing(name: str) -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        options = {"momentum": 0.9} if name == "SGD" else {}
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, lr=1e-3, **options)
        return optimizer

    assert len(steps_without_waiting("data=1", make)) == 3


@pytest.mark.parametrize("plan", ["data=1 precision=bf16", "data=1 precision=bf16 update=backward"])
@pytest.mark.parametrize("kind", [echelon.optim.Adafactor, echelon.optim.SM3])
def test_optimizers_of_rows_and_columns_wait_for_nothing(
    kind: Callable[..., torch.optim.Optimizer], plan: str
) -> None:
    assert len(steps_without_waiting(plan, lambda parameters: kind(parameters, lr=1e-3))) == 3


def test_dropout_waits_for_nothing() -> None:
    assert len(steps_without_waiting("data=1 microbatches=2", dropout=0.1)) == 3


def test_a_batch_in_the_user_s_pinned_memory_may_be_overwritten_after_the_step() -> None:
    """The copy to the device is not awaited in the step; a batch that comes too early would mix with it."""
    losses = []
    for pinned in (False, True):
        torch.manual_seed(0)
        engine = echelon.parallelize(build(CONFIG), "data=1", optimizer=adamw, loss=cross_entropy)
        memory = [tensor.pin_memory() if pinned else tensor.clone() for tensor in batch(0)]
        metrics = []
        for step in range(8):
            for tensor, values in zip(memory, batch(step), strict=True):
                tensor.copy_(values)
            metrics.append(engine.step((memory[0], memory[1])))
        losses.append([each.loss for each in metrics])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_numbers_that_are_read_late_are_those_that_are_read_at_once() -> None:
    torch.manual_seed(0)
    engine = echelon.parallelize(build(CONFIG), "data=1", optimizer=adamw, loss=cross_entropy, clip=1.0)
    late = [engine.step(batch(step)) for step in range(6)]
    torch.manual_seed(0)
    other = echelon.parallelize(build(CONFIG), "data=1", optimizer=adamw, loss=cross_entropy, clip=1.0)
    at_once = []
    for step in range(6):
        metrics = other.step(batch(step))
        at_once.append((metrics.loss, metrics.grad_norm, metrics.tokens))
    for each, expected in zip(late, at_once, strict=True):
        assert (each.loss, each.grad_norm, each.tokens) == pytest.approx(expected, rel=1e-4)


def test_a_refused_step_changes_no_bit_and_raises_later() -> None:
    engine = echelon.parallelize(build(CONFIG), "data=1", optimizer=adamw, loss=cross_entropy)
    engine.step(batch(0))
    before = [each.tensor.clone() for each in engine._update.owned()]
    inputs, targets = batch(1)
    engine.step((inputs, torch.full_like(targets, -100)))
    assert all(map(torch.equal, [each.tensor for each in engine._update.owned()], before))
    engine.step(batch(2))
    with pytest.raises(echelon.UserError, match="no replica had a sample"):
        engine.step(batch(3))


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_steps_that_overflow_are_skipped_without_waiting(schedule: str) -> None:
    torch.manual_seed(0)
    plan = f"schedule={schedule} microbatches=2 precision=fp16"
    engine = echelon.parallelize(build(CONFIG), plan, optimizer=adamw, loss=cross_entropy)
    for step in range(WARM_UP):
        engine.step(batch(step))
    scaling = engine._update.loss_scaling
    assert scaling is not None
    engine.synchronize()
    scaling.state = ScaleState(torch.full_like(scaling.state.scale, 2.0**60), scaling.state.good_steps)
    before = [each.tensor.clone() for each in engine._local.owned_weights()]
    with waiting_raises():
        metrics = [engine.step(batch(WARM_UP + step)) for step in range(3)]
    assert [each.skipped for each in metrics] == [True] * 3
    assert [each.loss_scale for each in metrics] == [2.0**60, 2.0**59, 2.0**58]
    engine.synchronize()
    assert all(map(torch.equal, [each.tensor for each in engine._local.owned_weights()], before))
    assert engine.skipped_steps == 3


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 8))


def counted(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    losses = nn.functional.cross_entropy(output, targets.clamp(min=0), reduction="none")
    return (losses * (targets >= 0)).sum(), (targets >= 0).sum()


def samples(step: int, target: int = 1) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    return inputs, torch.full((8,), target)


def test_a_refused_step_changes_no_buffer_and_nobody_waits_to_know() -> None:
    engine = echelon.parallelize(normalised(), "data=1", optimizer=adamw, loss=counted)
    for step in range(WARM_UP):
        engine.step(samples(step))
    before = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    torch.cuda.synchronize()
    with waiting_raises():
        refused = engine.step(samples(9, target=-1))
        after = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
        engine.step(samples(10))
    assert all(torch.equal(after[name], before[name]) for name in before)  # waits
    assert "refused: no replica had a sample" in repr(refused)
    with pytest.raises(echelon.UserError, match="no replica had a sample"):
        engine.synchronize()
    assert engine.steps == WARM_UP + 1
    assert engine.module[1].num_batches_tracked.item() == WARM_UP + 1
