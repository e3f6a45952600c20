"""The bench `short-steps`: steps so short that the host takes longer than the GPU, with and without graphs.

Plain torch is the usual loop: zero_grad, forward, loss, backward, a fused AdamW. Networks are in float32, and
GPT-2 in bf16, beside plain torch compiled with its loss (one-gpu); in microbatches beside echelon itself. All
train on the same batch, on the device, and their losses must agree, or there is no result. `share_of_peak` as
in one-gpu; `replayed` is 1 where graphs=auto has chosen to replay.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import one_gpu
from benchmarks.compare import Row, compare
from benchmarks.harness import alternate, tell, timed
from echelon.engine import Engine, parallelize
from echelon.engine.step.step import FlushedRunner
from echelon.models import ModelConfig, preset

_WARMUP = 24  # graphs=auto decides within them
_ROUNDING = 2e-2
_TORCH, _ECHELON, _GRAPHS = "torch", "echelon", "echelon graphs=auto"
_SMALL = ModelConfig("gpt", layers=1, width=32, heads=2, vocab=64, sequence=16, tied=True)

Step = Callable[[], Any]


def bench(quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """Steps of small networks and batches, with and without CUDA graphs, against plain torch."""
    rounds, steps = (2, 1) if quick else (10, 50)
    rows = _network("3 convolutions, B=32", _convolutions, (3, 32, 32), "", rounds, steps)
    rows += _network(
        "3 convolutions, B=32, microbatches=4", _convolutions, (3, 32, 32), "microbatches=4", rounds, steps
    )
    rows += _network("4 layers of 256, B=32", _layers, (256,), "", rounds, steps)
    rows += _language(quick, "", rounds, 1 if quick else 6)
    rows += _language(quick, "microbatches=4", rounds, 1 if quick else 6)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"optimizer": "AdamW, fused", "steps_per_round": steps, "device": device}, rows


def _convolutions() -> nn.Module:
    sizes = [(3, 32), (32, 64), (64, 128)]
    layers = [each for i, o in sizes for each in (nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))


def _layers() -> nn.Module:
    hidden = [each for _ in range(3) for each in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(256, 10))


def _network(
    case: str, make: Callable[[], nn.Module], shape: tuple[int, ...], words: str, rounds: int, steps: int
) -> list[Row]:
    device, numbers = one_gpu._device(), torch.Generator().manual_seed(0)
    inputs = torch.randn(32, *shape, generator=numbers).to(device)
    batch = inputs, torch.randint(10, (32,), generator=numbers).to(device)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return make().to(device)

    engines = {
        name: parallelize(
            model(),
            f"{words} {more}".strip() or "data=1",
            optimizer=one_gpu._adamw,
            loss=F.cross_entropy,
            audit="off",
        )
        for name, more in ((_ECHELON, "graphs=false"), (_GRAPHS, "graphs=auto"))
    }
    works = {_TORCH: _plain(model(), batch)}
    works |= {name: partial(engine.step, batch) for name, engine in engines.items()}
    return _rows(case, works, engines, rounds, steps, 0.0)


def _plain(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    optimizer = one_gpu._adamw(model.parameters())

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _language(quick: bool, words: str, rounds: int, steps: int) -> list[Row]:
    config = _SMALL if quick else dataclasses.replace(preset("gpt-small"), sequence=1024)
    case = one_gpu._gpt_case("", config, 8, (), rounds)
    compiled = "" if quick else "compile=true "
    engines = {
        name: parallelize(
            case.make_model(),
            f"precision=bf16 {compiled}{words} {more}",
            optimizer=one_gpu._adamw,
            loss=case.loss,
            audit="off",
        )
        for name, more in ((f"{_ECHELON} {compiled}".strip(), "graphs=false"), (_GRAPHS, "graphs=auto"))
    }
    works: dict[str, Step] = {}
    if not words:  # one batch, which takes plain torch as long
        plain = one_gpu._autocast_step(case) if quick else one_gpu._compiled_step(case)
        works = {_TORCH: partial(plain, case.batch)}
    works |= {name: partial(engine.step, case.batch) for name, engine in engines.items()}
    name = f"{'small' if quick else 'GPT-2 124M'}, B=8{', ' if words else ''}{words}"
    return _rows(name, works, engines, rounds, steps, case.flops)


def _rows(
    case: str, works: dict[str, Step], engines: dict[str, Engine], rounds: int, steps: int, flops: float
) -> list[Row]:
    losses = {name: [one_gpu._loss_of(work()) for _ in range(_WARMUP)] for name, work in works.items()}
    first, *others = losses.values()
    for other in others:
        if not all(math.isclose(*pair, rel_tol=_ROUNDING) for pair in zip(first, other, strict=True)):
            raise RuntimeError(f"{case}: the losses of torch and echelon differ: {losses}")

    def repeat(work: Step) -> None:
        for _ in range(steps):
            work()

    contenders = {name: timed(partial(repeat, work)) for name, work in works.items()}
    for name, engine in engines.items():
        tell("short-steps", f"{case}, {name}: {repr(engine).splitlines()[-1].strip()}")
    rows = []
    for row in compare(case, alternate(contenders, rounds), next(iter(works))):
        seconds = row.seconds.median / steps
        figures = {"step_seconds": seconds}
        peak = next((each for key, each in one_gpu._PEAKS.items() if key in one_gpu._device_name()), None)
        if flops and peak is not None:
            figures["share_of_peak"] = flops / seconds / peak
        if row.contender in engines:
            figures["replayed"] = float(_replays(engines[row.contender]))
        rows.append(dataclasses.replace(row, extras=figures))
    for engine in engines.values():
        engine.close(restore=False)
    return rows


def _replays(engine: Engine) -> bool:
    runner = engine._runner
    graphs = runner.graphs if isinstance(runner, FlushedRunner) else None
    return graphs is not None and graphs.enters_other_nodes
