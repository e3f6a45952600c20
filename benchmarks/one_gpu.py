"""The bench `one-gpu`: a training step in bf16 on one GPU, in echelon and in plain torch.

The peer is the usual loop: float32 weights, forward and loss under autocast to bfloat16, clipping and fused
AdamW. Echelon holds bfloat16 weights and float32 masters. Both update float32 numbers, so the losses of their
first steps must agree, or there is no result. A second case compares one step of four microbatches with four
steps of one: what accumulation costs. `idle` is the share of a step in which the GPU has nothing to do, by
torch's profiler.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from benchmarks.compare import Row, compare
from benchmarks.harness import alternate, timed
from echelon.engine import parallelize
from echelon.models import ModelConfig, build, cross_entropy, preset

_CLIP = 1.0
_WARMUP = 4  # the engine meters activations in its first three steps, which makes them slower
_MICROBATCHES = 4
_STEPS = 3  # in a round: the host may run ahead of the GPU within it
_HEAD_START = 400_000_000  # clock cycles, about 0.2 s, in which the host queues work
_ROUNDING = 2e-2  # bf16 has three digits; both losses are sums of many such numbers
_SMALL = ModelConfig("gpt", layers=1, width=32, heads=2, vocab=64, sequence=16, tied=True)

_TORCH, _ECHELON = "torch autocast", "echelon"

Batch = tuple[Tensor, Tensor]
Step = Callable[[Batch], Any]  # trains on a batch; returns something that has or is its loss


@dataclasses.dataclass(frozen=True)
class Size:
    """One model, and how many samples a step takes."""

    name: str
    config: ModelConfig
    samples: int
    rounds: int


def bench(quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """A training step in bf16 on one GPU, against plain torch under autocast."""
    sizes = [Size("small", _SMALL, 4, 2)] if quick else _sizes()
    rows = [row for size in sizes for row in _rows(size)]
    settings = {
        "models": {size.name: dataclasses.asdict(size.config) for size in sizes},
        "parameters": {size.name: size.config.num_parameters for size in sizes},
        "samples": {size.name: size.samples for size in sizes},
        "precision": "bf16",
        "optimizer": "AdamW, fused",
        "clip": _CLIP,
        "steps_per_round": _STEPS,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    return settings, rows


def _sizes() -> list[Size]:
    small, large = (dataclasses.replace(preset(name), sequence=1024) for name in ("gpt-small", "gpt-xl"))
    return [Size("GPT-2 124M", small, 32, 8), Size("GPT-2 1.5B", large, 8, 6)]


def _rows(size: Size) -> list[Row]:
    batch = make_batch(size.config, size.samples)
    steps = {_TORCH: torch_step(size.config), _ECHELON: echelon_step(size.config)}
    check_equal(size.name, {name: _losses(step, batch) for name, step in steps.items()})
    rows = _against(
        size, f"{size.name}, one step", {name: partial(step, batch) for name, step in steps.items()}, _TORCH
    )
    del steps
    return rows + _accumulation(size)


def _accumulation(size: Size) -> list[Row]:
    """Four microbatches in one step, beside four steps of one."""
    large = make_batch(size.config, _MICROBATCHES * size.samples)
    parts = [
        (inputs, targets)
        for inputs, targets in zip(*(each.chunk(_MICROBATCHES) for each in large), strict=True)
    ]
    single = echelon_step(size.config)
    several = echelon_step(size.config, _MICROBATCHES)
    one_by_one = f"{_MICROBATCHES} steps of one microbatch"
    works: dict[str, Callable[[], object]] = {
        one_by_one: lambda: [single(part) for part in parts],
        f"one step of {_MICROBATCHES}": partial(several, large),
    }
    return _against(size, f"{size.name}, microbatches={_MICROBATCHES}", works, one_by_one)


def _against(size: Size, case: str, works: dict[str, Callable[[], object]], baseline: str) -> list[Row]:
    contenders = {name: timed(partial(_repeat, work)) for name, work in works.items()}
    samples = alternate(contenders, size.rounds, warmup=_WARMUP)
    idle = {name: idle_share(work) for name, work in works.items()}
    tokens = size.samples * size.config.sequence * _STEPS * (1 if baseline == _TORCH else _MICROBATCHES)
    return [
        dataclasses.replace(
            row, extras={"tokens_per_second": tokens / row.seconds.median, "idle": idle[row.contender]}
        )
        for row in compare(case, samples, baseline)
    ]


def _repeat(work: Callable[[], object]) -> None:
    for _ in range(_STEPS):
        work()


def make_batch(config: ModelConfig, samples: int) -> Batch:
    """Random tokens in host memory, as a data loader has them, and for each the next token."""
    tokens = torch.randint(
        config.vocab, (samples, config.sequence + 1), generator=torch.Generator().manual_seed(0)
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def echelon_step(config: ModelConfig, microbatches: int = 1) -> Step:
    """`parallelize` on one device."""
    plan = f"precision=bf16 microbatches={microbatches}"
    engine = parallelize(_model(config), plan, optimizer=_adamw, loss=cross_entropy, clip=_CLIP)
    return engine.step


def torch_step(config: ModelConfig) -> Step:
    """The usual training loop."""
    device = _device()
    model = _model(config).to(device)
    parameters = list(model.parameters())
    optimizer = _adamw(parameters)

    def step(batch: Batch) -> Tensor:
        inputs, targets = (
            each.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else each
            for each in batch
        )
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        clip_grad_norm_(parameters, _CLIP)
        optimizer.step()
        return loss.detach()

    return step


def _model(config: ModelConfig) -> nn.Module:
    torch.manual_seed(0)
    with _device():  # to build it on the host takes longer than all that is measured
        return build(config)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True)


def _losses(step: Step, batch: Batch) -> list[float]:
    return [float(getattr(result, "loss", result)) for result in (step(batch) for _ in range(_WARMUP))]


def check_equal(case: str, losses: dict[str, list[float]]) -> None:
    """Raise unless both had the same losses in their first steps, as far as bf16 can tell."""
    pairs = list(zip(losses[_TORCH], losses[_ECHELON], strict=True))
    if not all(math.isclose(first, second, rel_tol=_ROUNDING) for first, second in pairs):
        raise RuntimeError(f"{case}: the losses of torch and echelon differ: {pairs}")


def idle_share(work: Callable[[], object]) -> float:
    """The share of the time of a few steps in which the GPU had nothing to do, once the host is ahead."""
    if not torch.cuda.is_available():
        return float("nan")
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.cuda._sleep(_HEAD_START)
        _repeat(work)
        torch.cuda.synchronize()
    on_device = [
        event.time_range
        for event in profile.events()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    return idle_between([(each.start, each.end) for each in on_device])


def idle_between(intervals: Sequence[tuple[float, float]]) -> float:
    """The share of the time from the end of the first interval to that of the last that none covers."""
    ordered = sorted(intervals)
    begin = end = ordered[0][1]
    idle = 0.0
    for start, stop in ordered[1:]:
        idle += max(0.0, start - end)
        end = max(end, stop)
    return idle / (end - begin)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
