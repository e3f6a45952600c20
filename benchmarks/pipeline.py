"""The bench `pipeline`: a training step of a GPT in stages on two ranks, by each schedule, beside its peer.

A case is one schedule: echelon, and the same schedule of torch.distributed.pipelining, or echelon's own 1f1b
where torch has none. They take turns step by step in the same ranks. The losses of the first steps must
agree, or there is no result.

Beside the times are two bubbles of echelon's steps: the measured one, and that of the same program simulated
with the medians of the measured costs. The last cases say what zero-bubble pays for it: the backward pass of
three layers in halves, gradients of inputs and of weights, beside that in one, in this process alone.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

from benchmarks.compare import Row, compare, slowest
from benchmarks.harness import alternate, measuring_ranks, timed
from benchmarks.stages import PEERS, torch_step
from echelon.engine import Engine
from echelon.engine.step.runtime.split_backward import SplitBackward
from echelon.launching import TRAINING_MODULES, preload
from echelon.models import ModelConfig, build
from echelon.plan import Plan
from echelon.program import Program, Span, simulate
from echelon.program import build as build_program
from echelon.program.simulate import bubble_of, measured_costs
from echelon.train.rehearsal import Batch, by_step, make_batch, make_engine

_RANKS, _CHUNKS, _MICROBATCHES = 2, 2, 8  # one sample per microbatch
_SCHEDULES = ("gpipe", "1f1b", "interleaved", "naive", "zero-bubble")
_FULL = ModelConfig("gpt", layers=6, width=384, heads=6, vocab=256, sequence=128)
_SMALL = ModelConfig("gpt", layers=2, width=32, heads=2, vocab=64, sequence=16)

_HALVED = [(192, 64), (384, 128), (768, 256), (1536, 256)]  # width and tokens of a microbatch
_HALVED_LAYERS, _HALVED_ROUNDS = 3, 15

_ROUNDS = (60, 20)  # against torch, where a few percent matter; against echelon's own
_WARMUP = 4  # the engine meters activations in its first three steps, which makes them slower
_ECHELON, _OWN_PEER = "echelon", "1f1b"
_PRELOADED = ("benchmarks.pipeline", "torch.distributed.pipelining")

# Float32 sums in another order differ by this much of a loss after some steps of AdamW.
_ROUNDING = 1e-3


class Measured(NamedTuple):
    """One rank's seconds by contender, one number per round; its losses, one per step, where it has them; and
    when each instruction of echelon's steps ran."""

    seconds: dict[str, list[float]]
    losses: dict[str, list[float | None]]
    spans: list[list[Span]]


def bench(quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """A training step of a GPT in stages on 2 ranks, by schedule, against torch.distributed.pipelining."""
    preload(*TRAINING_MODULES, *_PRELOADED)
    config, rounds, own_rounds = (_SMALL, 2, 2) if quick else (_FULL, *_ROUNDS)
    rows: list[Row] = []
    for schedule in _SCHEDULES:
        rows += _rows(plan_of(schedule), config, rounds if schedule in PEERS else own_rounds)
    for width, tokens in _HALVED[:1] if quick else _HALVED:
        rows += _halves(width, tokens, 2 if quick else _HALVED_ROUNDS)
    settings = {
        "model": dataclasses.asdict(config),
        "parameters": config.num_parameters,
        "ranks": _RANKS,
        "microbatches": _MICROBATCHES,
        "samples_per_microbatch": 1,
        "chunks_of_interleaved": _CHUNKS,
        "precision": "fp32",
        "optimizer": "AdamW, fused",
        "clip": None,
        "rounds": rounds,
        "rounds_beside_own": own_rounds,
    }
    return settings, rows


def plan_of(schedule: str) -> Plan:
    """The plan of a case."""
    chunks = _CHUNKS if schedule == "interleaved" else 1
    return Plan(pipeline=_RANKS, schedule=schedule, microbatches=_MICROBATCHES, chunks=chunks)


def _rows(plan: Plan, config: ModelConfig, rounds: int) -> list[Row]:
    with measuring_ranks(_RANKS) as ranks:
        measured_ranks = ranks.run(measure, plan, config, rounds)
    check_equal(plan, [rank.losses for rank in measured_ranks])
    steps = by_step([rank.spans for rank in measured_ranks])
    extras = bubbles(steps, build_program(plan.schedule, plan.replicas, plan.microbatches, plan.chunks))
    rows = compare(plan.schedule, slowest([rank.seconds for rank in measured_ranks]), _baseline(plan))
    return [dataclasses.replace(row, extras=extras if row.contender == _ECHELON else {}) for row in rows]


def _baseline(plan: Plan) -> str:
    return f"torch {PEERS[plan.schedule]}" if plan.schedule in PEERS else f"echelon, {_OWN_PEER}"


def _halves(width: int, tokens: int, rounds: int) -> list[Row]:
    config = ModelConfig("gpt", _HALVED_LAYERS, width, 6, vocab=64, sequence=tokens)
    blocks = build(config).layers()[1:-1]
    gradient = torch.randn(1, tokens, width)
    ways: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward() -> None:
        for block in blocks:
            block.zero_grad()
        inputs = outputs = torch.ones(1, tokens, width, requires_grad=True)
        for block in blocks:
            outputs = block(outputs)
        ways[:] = [(inputs, outputs)]

    def in_one() -> None:
        ways[0][1].backward(gradient)

    def in_halves() -> None:
        ((inputs, outputs),) = ways
        halves = SplitBackward([get_gradient_edge(outputs)], [gradient], [inputs])
        halves.for_inputs()
        halves.for_weights()

    contenders = {"in one": timed(in_one, before=forward), "in halves": timed(in_halves, before=forward)}
    samples = alternate(contenders, rounds, warmup=2)
    return compare(f"backward of {_HALVED_LAYERS} layers of {width}, {tokens} tokens", samples, "in one")


def measure(plan: Plan, config: ModelConfig, rounds: int) -> Measured:
    """Runs in every rank: the contenders of one case, in turn."""
    batch = make_batch(config, plan.microbatches)
    spans: list[list[Span]] = []
    works: dict[str, Callable[[], float | None]] = {
        _baseline(plan): _peer(plan, config, batch),
        _ECHELON: partial(_train, make_engine(config, plan), batch, spans),
    }
    losses: dict[str, list[float | None]] = {name: [] for name in works}
    contenders = {
        name: timed(partial(_keep, work, losses[name]), before=dist.barrier) for name, work in works.items()
    }
    seconds = alternate(contenders, rounds, warmup=_WARMUP)
    return Measured(seconds, losses, spans[_WARMUP:])


def _peer(plan: Plan, config: ModelConfig, batch: Batch) -> Callable[[], float | None]:
    if plan.schedule in PEERS:
        return partial(torch_step(config, plan), batch)
    return partial(_train, make_engine(config, plan_of(_OWN_PEER)), batch, [])


def _train(engine: Engine, batch: Batch, spans: list[list[Span]]) -> float:
    loss = engine.step(batch).loss
    spans.append(list(engine.spans))
    return loss


def _keep(work: Callable[[], float | None], losses: list[float | None]) -> None:
    losses.append(work())


def check_equal(plan: Plan, ranks: Sequence[dict[str, list[float | None]]]) -> None:
    """Raise unless echelon and its peer had the same losses in their first steps."""
    echelon_losses, peer_losses = (
        [_loss_of_step(name, ranks, step) for step in range(_WARMUP)] for name in (_ECHELON, _baseline(plan))
    )
    if not all(
        math.isclose(*pair, rel_tol=_ROUNDING) for pair in zip(echelon_losses, peer_losses, strict=True)
    ):
        raise RuntimeError(
            f"{plan.schedule}: the losses of echelon and {_baseline(plan)} differ: "
            f"{echelon_losses}, {peer_losses}"
        )


def _loss_of_step(contender: str, ranks: Sequence[dict[str, list[float | None]]], step: int) -> float:
    """From the last rank: it has the last stage, where the loss is computed."""
    loss = ranks[-1][contender][step]
    return math.nan if loss is None else loss


def bubbles(steps: Sequence[Sequence[Span]], program: Program) -> dict[str, float]:
    """The measured bubble (median over `steps`), and that of `program` simulated with the measured costs."""
    ranks = len(program.ranks)
    costs = measured_costs(steps, program.stages)
    real = median(bubble_of(step, ranks) for step in steps)
    planned = bubble_of(list(simulate(program, costs).spans()), ranks)
    return {
        "bubble_measured": real,
        "bubble_simulated": planned,
        "bubble_difference_points": 100 * (real - planned),
        "transfer_seconds": float(costs.transfer),
    }
