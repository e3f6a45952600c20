"""The bench `one-gpu`: a training step in bf16 on one GPU, in echelon and in plain torch.

Plain torch is the usual loop under autocast, and the fastest that it has: the whole model compiled with its
loss, bfloat16 weights beside float32 masters. Models are a GPT of ours and a Llama of transformers as it is.
All update float32 numbers, so the losses of their first steps must agree, or there is no result. A last case
compares one step of four microbatches with four steps of one: what accumulation costs. `idle` is the share of
a step in which the GPU has nothing to do, by torch's profiler; `share_of_peak` that of the GPU's dense bf16
arithmetic which the model's own products take (6 parameters a token, and attention).
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.compare import Row, compare
from benchmarks.harness import alternate, timed
from echelon.engine import parallelize
from echelon.models import ModelConfig, build, cross_entropy, preset

_WARMUP = 4  # the engine meters activations in its first three steps, which makes them slower
_MICROBATCHES = 4
_STEPS = 3  # in a round: the host may run ahead of the GPU within it
_HEAD_START = 400_000_000  # clock cycles, about 0.2 s, in which the host queues work
_ROUNDING = 2e-2  # bf16 has three digits; both losses are sums of many such numbers
_PEAKS = {"H100": 989e12, "H200": 989e12}  # dense bf16 FLOP/s, by NVIDIA's datasheets
_SMALL = ModelConfig("gpt", layers=1, width=32, heads=2, vocab=64, sequence=16, tied=True)

_AUTOCAST, _COMPILED, _EAGER, _FAST = "torch autocast", "torch compiled", "echelon", "echelon compile=true"

Batch = Any
Step = Callable[[Batch], Any]  # trains on a batch; returns something that has or is its loss


class Case(NamedTuple):
    """A model with one batch on the device, and what plain torch and echelon take as its loss."""

    name: str
    make_model: Callable[[], nn.Module]
    batch: Batch
    plain_loss: Callable[[nn.Module, Batch], Tensor]
    loss: Callable[[Tensor, Tensor], Any] | None  # None: the model's own
    tokens: int
    flops: float  # of the model's own products, forward and backward
    contenders: tuple[str, ...]
    rounds: int


def bench(quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """A training step in bf16 on one GPU, against plain torch under autocast and compiled with its loss."""
    rows = [row for case in _cases(quick) for row in _rows(case)]
    config, samples = (_SMALL, 4) if quick else (_gpt("gpt-small"), 16)
    rows += _accumulation(config, samples, "" if quick else "compile=true", 2 if quick else 6)
    settings = {
        "precision": "bf16",
        "optimizer": "AdamW, fused",
        "steps_per_round": _STEPS,
        "device": _device_name() or "cpu",
    }
    return settings, rows


def _cases(quick: bool) -> list[Case]:
    if quick:
        return [_gpt_case("small", _SMALL, 4, (_AUTOCAST, _EAGER), 2)]
    return [
        _gpt_case("GPT-2 124M, B=64", _gpt("gpt-small"), 64, (_COMPILED, _AUTOCAST, _EAGER, _FAST), 6),
        _gpt_case("GPT-2 1.5B, B=16", _gpt("gpt-xl"), 16, (_AUTOCAST, _FAST), 4),
        _llama_case((_COMPILED, _AUTOCAST, _EAGER, _FAST)),
    ]


def _gpt(name: str) -> ModelConfig:
    return dataclasses.replace(preset(name), sequence=1024)


def _gpt_case(name: str, config: ModelConfig, samples: int, contenders: tuple[str, ...], rounds: int) -> Case:
    def plain_loss(model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    batch = tuple(each.to(_device()) for each in make_batch(config, samples))
    tokens, products = samples * config.sequence, config.layers * config.width * config.sequence
    flops = 6.0 * (config.num_parameters + products) * tokens
    make_model = partial(_model, partial(build, config))
    return Case(name, make_model, batch, plain_loss, cross_entropy, tokens, flops, contenders, rounds)


def _llama_case(contenders: tuple[str, ...]) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    samples, length = 8, 2048
    config = LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        intermediate_size=5632,
        vocab_size=32000,
        max_position_embeddings=length,
        use_cache=False,
    )
    make: Any = LlamaForCausalLM
    with torch.device("meta"):
        parameters: int = sum(each.numel() for each in make(config).parameters())
    ids = torch.randint(32000, (samples, length), generator=torch.Generator().manual_seed(0)).to(_device())
    flops = 6.0 * (parameters + 22 * 2048 * length) * samples * length
    return Case(
        "Llama 1.1B of transformers, B=8",
        partial(_model, partial(make, config)),
        {"input_ids": ids, "labels": ids},
        lambda model, batch: model(**batch).loss,
        None,
        samples * length,
        flops,
        contenders,
        4,
    )


def _rows(case: Case) -> list[Row]:
    steps: dict[str, Callable[[], object]] = {}
    peaks, firsts, losses = {}, {}, {}
    for name in case.contenders:
        before = _start_of_peak()
        step = steps[name] = partial(_MAKERS[name](case), case.batch)
        start = time.perf_counter()
        losses[name] = [_loss_of(step())]
        firsts[name] = time.perf_counter() - start
        losses[name] += [_loss_of(step()) for _ in range(_WARMUP)]
        peaks[name] = _peak() - before
    check_equal(case.name, losses)
    extras = {name: {"first_seconds": firsts[name], "peak_bytes": float(peaks[name])} for name in steps}
    return _against(case.name, steps, case.contenders[0], case.rounds, case.tokens, case.flops, extras)


def _loss_of(result: Any) -> float:
    return float(getattr(result, "loss", result))


def _against(
    name: str,
    works: dict[str, Callable[[], object]],
    baseline: str,
    rounds: int,
    tokens: int,
    flops: float,
    extras: dict[str, dict[str, float]],
) -> list[Row]:
    contenders = {each: timed(partial(_repeat, work)) for each, work in works.items()}
    rows = []
    for row in compare(name, alternate(contenders, rounds), baseline):
        seconds = row.seconds.median / _STEPS
        figures = {"tokens_per_second": tokens / seconds, "idle": idle_share(works[row.contender])}
        peak = next((each for key, each in _PEAKS.items() if key in _device_name()), None)
        if peak is not None:
            figures["share_of_peak"] = flops / seconds / peak
        rows.append(dataclasses.replace(row, extras=figures | extras.get(row.contender, {})))
    return rows


def _accumulation(config: ModelConfig, samples: int, words: str, rounds: int) -> list[Row]:
    """Four microbatches in one step, beside one batch of as many samples."""
    case = _gpt_case("", config, _MICROBATCHES * samples, (), rounds)
    name = f"GPT-2 124M, microbatches={_MICROBATCHES} {words}".strip() if words else "small, microbatches=4"
    works: dict[str, Callable[[], object]] = {
        "one batch": partial(_engine_step(case, words), case.batch),
        f"{_MICROBATCHES} microbatches": partial(
            _engine_step(case, f"{words} microbatches={_MICROBATCHES}"), case.batch
        ),
    }
    for work in works.values():
        for _ in range(_WARMUP):
            work()
    return _against(name, works, "one batch", rounds, case.tokens, case.flops, {})


def _repeat(work: Callable[[], object]) -> None:
    for _ in range(_STEPS):
        work()


def make_batch(config: ModelConfig, samples: int) -> tuple[Tensor, Tensor]:
    """Random tokens in host memory, as a data loader has them, and for each the next token."""
    tokens = torch.randint(
        config.vocab, (samples, config.sequence + 1), generator=torch.Generator().manual_seed(0)
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _engine_step(case: Case, words: str) -> Step:
    """`parallelize` on one device."""
    plan = f"precision=bf16 {words}"
    return parallelize(case.make_model(), plan, optimizer=_adamw, loss=case.loss, audit="off").step


def _autocast_step(case: Case) -> Step:
    """The usual training loop."""
    model = case.make_model()
    optimizer = _adamw(model.parameters())

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(_device().type, torch.bfloat16):
            loss = case.plain_loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _compiled_step(case: Case) -> Step:
    """Model and loss as one compiled function; bfloat16 weights beside float32 masters."""
    model = case.make_model().bfloat16()
    weights: list[Tensor] = list(model.parameters())
    masters: list[Tensor] = [nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer, compute = _adamw(masters), torch.compile(partial(case.plain_loss, model))

    def step(batch: Batch) -> Tensor:
        loss = compute(batch)
        loss.backward()
        for weight, master in zip(weights, masters, strict=True):
            master.grad, weight.grad = weight.grad.float(), None  # type: ignore[union-attr]
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        return loss.detach()

    return step


_MAKERS: dict[str, Callable[[Case], Step]] = {
    _AUTOCAST: _autocast_step,
    _COMPILED: _compiled_step,
    _EAGER: partial(_engine_step, words=""),
    _FAST: partial(_engine_step, words="compile=true"),
}


def _model(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    with _device():  # to build it on the host takes longer than all that is measured
        model = make()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Embedding):  # else logits are so large that one word has all of them
                module.weight.normal_(0, 0.02)
    return model


def _adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True)


def check_equal(case: str, losses: dict[str, list[float]]) -> None:
    """Raise unless all had the same first loss, and those with bf16 weights the same later ones: float32
    weights follow updates that are smaller than the distance of two numbers in bf16."""
    later = [each[1:] for name, each in losses.items() if name != _AUTOCAST]
    same_steps = [[each[0] for each in losses.values()], *zip(*later, strict=True)]
    for first, *others in same_steps:
        if not all(math.isclose(first, other, rel_tol=_ROUNDING) for other in others):
            raise RuntimeError(f"{case}: the losses of torch and echelon differ: {losses}")


def _start_of_peak() -> int:
    """Return what is allocated before a contender is built, and forget the peaks of others."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


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


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""
