"""offload=optimizer over the real boundary of one GPU: equal, small on the device, and nobody waits."""

from typing import Any

import pytest
import torch
from torch import Tensor

import echelon
from echelon.engine import Engine
from echelon.models import ModelConfig, build, cross_entropy
from tests.gpu.test_no_sync import waiting_raises

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = ModelConfig("gpt", 4, 128, 4, vocab=256, sequence=64, tied=True)
LARGE = ModelConfig("gpt", 6, 1024, 8, vocab=256, sequence=64)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def make(plan: str, config: ModelConfig = CONFIG, **options: Any) -> Engine:
    torch.manual_seed(0)
    return echelon.parallelize(
        build(config), plan, optimizer=adamw, loss=cross_entropy, check_every=0, **options
    )


def batch(step: int, config: ModelConfig = CONFIG) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(config.vocab, (4, config.sequence + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def weights_after(plan: str, steps: int = 6, **options: Any) -> dict[str, Tensor]:
    with make(plan, **options) as engine:
        for step in range(steps):
            engine.step(batch(step))
        return engine.full_state_dict()


@pytest.mark.parametrize(
    ("plan", "clip"),
    [
        ("precision=fp64", 0.5),
        ("precision=fp64 update=backward", None),
        ("precision=fp64 microbatches=2 update=last-backward", None),
        ("precision=fp64 recompute=full update=backward", None),
    ],
)
def test_it_is_equal(plan: str, clip: float | None) -> None:
    ours, theirs = weights_after(f"{plan} offload=optimizer", clip=clip), weights_after(plan, clip=clip)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("plan", ["precision=bf16", "precision=bf16 update=backward", "precision=fp16"])
def test_masters_on_the_host_train_as_those_on_the_device(plan: str) -> None:
    def losses(of: str) -> list[float]:
        with make(of) as engine:
            return [engine.step(batch(step % 2)).loss for step in range(12)]

    ours, theirs = losses(f"{plan} offload=optimizer"), losses(plan)
    assert ours == pytest.approx(theirs, rel=2e-2)
    assert ours[-1] < ours[0]


def test_a_delayed_update_is_that_of_the_formula() -> None:
    ours = weights_after("precision=fp64 offload=optimizer delay=1", 1)
    for name, value in weights_after("precision=fp64", 1).items():
        torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-11, msg=name)
    with make("precision=fp64 offload=optimizer delay=1") as engine:
        losses = [engine.step(batch(0)).loss for _ in range(4)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12), "step 1 has the weights of step 0"
    assert losses[2] < losses[1]


def test_the_device_keeps_weights_and_a_few_gradients() -> None:
    def peak(plan: str) -> int:
        with make(plan, LARGE) as engine:
            for step in range(4):
                engine.step(batch(step, LARGE))
            engine.synchronize()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            for step in range(3):
                engine.step(batch(step, LARGE))
            engine.synchronize()
            assert engine.memory().now["optimizer"] == 0
            return torch.cuda.max_memory_allocated()

    numel, unit = LARGE.num_parameters, LARGE.num_parameters / LARGE.layers
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    taken = peak("precision=bf16 recompute=full update=backward offload=optimizer") - before
    activations = 64 * 2**20
    assert taken <= 2 * numel + 4 * 4 * unit + activations


@pytest.mark.parametrize(
    "plan",
    [
        "precision=bf16 update=backward offload=optimizer",
        "precision=bf16 offload=optimizer",
        "precision=fp16 offload=optimizer delay=1",
    ],
)
def test_the_thread_of_the_step_reads_nothing_from_the_device(plan: str) -> None:
    with make(plan) as engine:
        for step in range(5):
            engine.step(batch(step))
        engine.synchronize()
        torch.cuda.synchronize()
        with waiting_raises():
            for step in range(5, 8):
                engine.step(batch(step))
