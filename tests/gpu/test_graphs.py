"""Passes that are replayed as one CUDA graph train what passes as they are train."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.engine import Engine
from echelon.engine.step.step import FlushedRunner
from echelon.memory.gist.compression import any_size
from echelon.models import ModelConfig, build, build_image, cross_entropy
from tests.gpu.waiting import waiting_raises

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = ModelConfig("gpt", layers=2, width=64, heads=4, vocab=97, sequence=32, tied=True)
STEPS = 24
CLOSE = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


def language() -> nn.Module:
    torch.manual_seed(0)
    return build(CONFIG)


def tokens(step: int, samples: int = 8) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    drawn = torch.randint(CONFIG.vocab, (samples, CONFIG.sequence + 1), generator=numbers)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def images(step: int, samples: int = 8) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    return torch.randn(samples, 3, 8, 8, generator=numbers), torch.randint(5, (samples,), generator=numbers)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))


def engine_of(model: nn.Module, plan: str, **options: Any) -> Engine:
    settings = {"optimizer": adamw, "loss": nn.functional.cross_entropy, "audit": "off", **options}
    return echelon.parallelize(model, plan, **settings)


def says(engine: Engine) -> str:
    runner = engine._runner
    assert isinstance(runner, FlushedRunner)
    assert runner.graphs is not None
    return runner.graphs.describe()


Step = Callable[[Engine, int], Any]


def both(model: Callable[[], nn.Module], plan: str, step: Step, **options: Any) -> tuple[list[float], str]:
    """Train with and without graphs; losses and weights must agree. Returns what was recorded."""
    losses, weights, said = [], [], ""
    for words in ("graphs=false", "graphs=true"):
        engine = engine_of(model(), f"{plan} {words}", **options)
        losses.append([each.loss for number in range(STEPS) if (each := step(engine, number)) is not None])
        weights.append(engine.full_state_dict())
        said = says(engine) if words == "graphs=true" else said
        engine.close(restore=False)
    precision = echelon.Plan.parse(plan).precision
    assert losses[1] == pytest.approx(losses[0], rel=CLOSE[precision])
    if precision in ("fp64", "fp32"):
        for name, value in weights[0].items():
            torch.testing.assert_close(weights[1][name], value, rtol=CLOSE[precision], atol=CLOSE[precision])
    return losses[1], said


REPLAYED = "passes are replayed (1 form of batches)"


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
def test_a_language_model(precision: str, microbatches: int) -> None:
    plan = f"precision={precision} microbatches={microbatches}"
    losses, said = both(
        language, plan, lambda engine, step: engine.step(tokens(step)), loss=cross_entropy, clip=0.5
    )
    assert REPLAYED in said
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_a_network_with_running_statistics(precision: str) -> None:
    _, said = both(network, f"precision={precision}", lambda engine, step: engine.step(images(step)))
    assert REPLAYED in said


def test_batches_on_the_device_and_of_several_shapes() -> None:
    def step(engine: Engine, number: int) -> Any:
        batch = images(number, 8 if number % 2 else 6)
        return engine.step(tuple(each.cuda() for each in batch))

    _, said = both(network, "precision=fp64", step)
    assert "2 forms" in said


def test_compiled_layers() -> None:
    _, said = both(
        language,
        "precision=bf16 compile=true",
        lambda engine, step: engine.step(tokens(step)),
        loss=cross_entropy,
    )
    assert REPLAYED in said


def test_what_is_done_between_steps() -> None:
    def step(engine: Engine, number: int) -> Any:
        if number == 12:
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    parameter.mul_(0.9)
        if number == 14:
            engine.evaluate(images(99))
        if number == 16:
            engine.module.get_submodule("1").eval()
        return engine.step(images(number))

    both(network, "precision=fp64", step)


class Aside(nn.Module):
    def __init__(self, aside: Callable[[Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.aside = network(), aside

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        self.aside(output)
        return output


class GENERATOR:
    """Of the user's own, made where there is a device."""

    made: torch.Generator | None = None

    @classmethod
    def get(cls) -> torch.Generator:
        cls.made = cls.made or torch.Generator("cuda")
        return cls.made


def stop_stream(_: Tensor) -> None:
    torch.cuda.current_stream().synchronize()


@pytest.mark.parametrize(
    ("aside", "reason"),
    [
        (lambda output: output.sum().item(), "waits for the device|cannot be recorded"),
        (lambda output: output[output > 0], "waits for the device|cannot be recorded"),
        (stop_stream, "waits for the device|cannot be recorded"),
        (lambda output: output + torch.rand(3, device="cuda", generator=GENERATOR.get())[0], "draw"),
    ],
)
def test_a_model_that_cannot_be_recorded_runs_as_it_is(
    aside: Callable[[Tensor], object], reason: str
) -> None:
    with pytest.warns(UserWarning, match=f"graphs=true: passes run as they are, since.*({reason})"):
        both(lambda: Aside(aside), "precision=fp64", lambda engine, step: engine.step(images(step)))
    torch.rand(3, device="cuda")  # the generator is no part of a failed recording
    torch.nn.functional.dropout(torch.ones(9, device="cuda"))
    assert torch.ones(1 << 20, device="cuda").sum().item() == 1 << 20


class Drawing(nn.Module):
    """Drops by a module and by a function, and adds noise."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = network(), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.dropout(self.inner(x + 0.1 * torch.randn_like(x)))
        return nn.functional.dropout(output, 0.3, self.training)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    ("make", "precision"),
    [
        (Drawing, "fp64"),
        (lambda: nn.Sequential(network(), nn.Dropout(0.1)), "bf16"),
        (lambda: nn.Sequential(network(), nn.AlphaDropout(0.1)), "fp32"),
    ],
)
def test_a_replay_draws_the_numbers_of_its_own_step(
    make: Callable[[], nn.Module], precision: str, microbatches: int
) -> None:
    def step(engine: Engine, number: int) -> Any:
        for module in engine.module.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()  # of which microbatches would have their own statistics
        return engine.step(images(number))

    _, said = both(make, f"precision={precision} microbatches={microbatches}", step)
    assert REPLAYED in said


def test_dropout_of_compiled_layers_runs_as_it_is() -> None:
    config = dataclasses.replace(CONFIG, dropout=0.1)
    with pytest.warns(UserWarning, match="dropout in compiled layers"):
        both(
            lambda: build(config),
            "precision=bf16 compile=true",
            lambda engine, step: engine.step(tokens(step)),
            loss=cross_entropy,
        )


@pytest.mark.parametrize("name", ["alexnet", "vgg16", "inception-v1"])
@pytest.mark.parametrize("compress", ["gist", "gist-fp16", "gist-fp10", "gist-fp8"])
def test_what_is_kept_in_fewer_bits(name: str, compress: str) -> None:
    def step(engine: Engine, number: int) -> Any:
        numbers = torch.Generator().manual_seed(number)
        return engine.step(
            (torch.randn(4, 3, 32, 32, generator=numbers), torch.randint(8, (4,), generator=numbers))
        )

    def make() -> nn.Module:
        torch.manual_seed(0)
        return build_image(f"{name}-tiny")

    with any_size():
        _, said = both(make, f"precision=fp32 compress={compress}", step, optimizer=sgd)
    assert REPLAYED in said


def test_replays_wait_for_nothing_and_are_chosen_by_time() -> None:
    engine = engine_of(network(), "graphs=auto")
    batch = [each.cuda() for each in images(0)]
    for _ in range(30):
        engine.step((batch[0], batch[1]))
        torch.cuda.synchronize()
    assert REPLAYED in says(engine)
    with waiting_raises():
        for _ in range(5):
            engine.step((batch[0], batch[1]))
    assert engine.step((batch[0], batch[1])).loss < 1.0
    engine.close()


def test_a_step_that_keeps_the_device_busy_is_not_replayed() -> None:
    torch.manual_seed(0)
    wide = nn.Sequential(
        nn.Linear(4096, 8192), nn.ReLU(), nn.Linear(8192, 4096), nn.ReLU(), nn.Linear(4096, 5)
    )
    engine = engine_of(wide, "graphs=auto")
    batch = torch.randn(8192, 4096, device="cuda"), torch.zeros(8192, dtype=torch.int64, device="cuda")
    for _ in range(30):
        engine.step(batch)
    assert "slower than the host" in says(engine)


def test_code_that_reads_something_else_is_found() -> None:
    factor = torch.nn.Linear  # an attribute of a library's class is no constant

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.inner(x) * getattr(factor, "factor", 1.0)
            return output

    engine = engine_of(Reading(), "graphs=true")
    for step in range(STEPS):
        engine.step(images(step))
    assert REPLAYED in says(engine)
    factor.factor = 3.0  # type: ignore[attr-defined]
    try:
        with pytest.raises(echelon.UserError, match="no longer do what model and loss do"):
            [engine.step(images(step)) for step in range(2 * STEPS)]
    finally:
        del factor.factor  # type: ignore[attr-defined]
