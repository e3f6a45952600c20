"""The bench `tensor`: a training step of some blocks of a transformer, split over two ranks, beside torch's.

A case is one family and one plan: echelon, and the same split by DTensors of torch.distributed.tensor. They
take turns step by step in the same ranks. `layers` says what each does. The gradients of the first step and
the losses of the first steps must agree, or there is no result.

Beside echelon's times are the counts of its ledger: collectives and bytes of one rank, per layer and step.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from benchmarks.compare import Row, compare, slowest
from benchmarks.harness import alternate, measuring_ranks, timed
from benchmarks.layers import Gradients, echelon_stack, make_hidden, torch_stack
from echelon.collectives.mesh import Mesh
from echelon.launching import TRAINING_MODULES, preload
from echelon.models import ModelConfig
from echelon.plan import Plan

_RANKS, _SAMPLES = 2, 8
_PLANS = (Plan(tensor=_RANKS), Plan(tensor=_RANKS, sequence=True))
_FULL = (
    ModelConfig("gpt", layers=2, width=384, heads=6, vocab=256, sequence=128),
    ModelConfig("llama", layers=2, width=384, heads=6, kv_heads=2, vocab=256, sequence=128),
)
_SMALL = (
    ModelConfig("gpt", layers=1, width=32, heads=2, vocab=64, sequence=16),
    ModelConfig("llama", layers=1, width=32, heads=4, kv_heads=2, vocab=64, sequence=16),
)

_WARMUP = 4
_ECHELON, _TORCH = "echelon", "torch DTensor"
_PRELOADED = ("benchmarks.tensor", "torch.distributed.tensor.parallel")

# Float32 sums in another order differ by this much. A gradient that is zero except for rounding (that of a
# key's bias) is compared relative to a small part of the largest gradient.
_ROUNDING, _SMALL_PART = 1e-4, 1e-2


class Measured(NamedTuple):
    """One rank's seconds by contender, one number per round; its losses, one per step; by how much the
    gradients of the first step differ; and the collectives and bytes sent of echelon's last step."""

    seconds: dict[str, list[float]]
    losses: dict[str, list[float]]
    differences: dict[str, float]
    collectives: int
    sent: int


def bench(quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """A training step of transformer blocks split over 2 ranks, against torch's DTensor."""
    preload(*TRAINING_MODULES, *_PRELOADED)
    configs, rounds = (_SMALL, 2) if quick else (_FULL, 30)
    rows = [row for config in configs for plan in _PLANS for row in _rows(plan, config, rounds)]
    settings = {
        "models": [dataclasses.asdict(config) for config in configs],
        "without": "embedding and head",
        "ranks": _RANKS,
        "samples": _SAMPLES,
        "precision": "fp32",
        "optimizer": "AdamW, fused",
        "clip": None,
        "rounds": rounds,
    }
    return settings, rows


def _rows(plan: Plan, config: ModelConfig, rounds: int) -> list[Row]:
    with measuring_ranks(_RANKS) as ranks:
        measured_ranks = ranks.run(measure, plan, config, rounds)
    case = f"{config.family}, {plan}"
    check_equal(case, measured_ranks, in_parts=plan.sequence)
    extras = {
        "collectives_per_layer_count": max(rank.collectives for rank in measured_ranks) / config.layers,
        "sent_per_layer_bytes": max(rank.sent for rank in measured_ranks) / config.layers,
    }
    rows = compare(case, slowest([rank.seconds for rank in measured_ranks]), _TORCH)
    return [dataclasses.replace(row, extras=extras if row.contender == _ECHELON else {}) for row in rows]


def measure(plan: Plan, config: ModelConfig, rounds: int) -> Measured:
    """Runs in every rank: the contenders of one case, in turn."""
    hidden = make_hidden(config, _SAMPLES, sequence=plan.sequence)
    mesh = Mesh.join(plan)
    stacks = {_TORCH: torch_stack(config, plan), _ECHELON: echelon_stack(config, mesh)}
    losses = {name: [stack.step(hidden)] for name, stack in stacks.items()}
    differences = differing(stacks[_ECHELON].gradients(), stacks[_TORCH].gradients())
    contenders = {
        name: timed(partial(_train, stack.step, hidden, losses[name]), before=dist.barrier)
        for name, stack in stacks.items()
    }
    seconds = alternate(contenders, rounds, warmup=_WARMUP)
    moves = mesh.ledger.moves
    return Measured(seconds, losses, differences, len(moves), sum(move.traffic.sent for move in moves))


def _train(step: Callable[[Tensor], float], hidden: Tensor, losses: list[float]) -> None:
    losses.append(step(hidden))


def differing(gradients: Gradients, reference: Gradients) -> dict[str, float]:
    """By how much each gradient differs, relative to its norm."""
    sizes = {name: reference[name].norm().item() for name in gradients}
    least = _SMALL_PART * max(sizes.values())
    return {
        name: (gradients[name] - reference[name]).norm().item() / max(sizes[name], least)
        for name in gradients
    }


def check_equal(case: str, ranks: Sequence[Measured], *, in_parts: bool) -> None:
    """Raise unless both had the same gradients and losses. `in_parts`: each rank has a part of each loss."""
    for name, difference in (named for rank in ranks for named in rank.differences.items()):
        if not difference < _ROUNDING:
            raise RuntimeError(
                f"{case}: the gradients of {_ECHELON} and {_TORCH} differ: {name} by {difference:.1e}"
            )
    echelon_losses, torch_losses = (
        _losses([rank.losses[name] for rank in ranks], in_parts) for name in (_ECHELON, _TORCH)
    )
    if not all(
        math.isclose(*pair, rel_tol=_ROUNDING) for pair in zip(echelon_losses, torch_losses, strict=True)
    ):
        raise RuntimeError(
            f"{case}: the losses of {_ECHELON} and {_TORCH} differ: {echelon_losses}, {torch_losses}"
        )


def _losses(ranks: Sequence[list[float]], in_parts: bool) -> list[float]:
    """The losses of the first steps, over all ranks."""
    steps = zip(*(losses[:_WARMUP] for losses in ranks), strict=True)
    return [sum(losses) if in_parts else losses[0] for losses in steps]
