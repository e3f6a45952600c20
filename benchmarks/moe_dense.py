"""The bench `moe-dense`: a mixture of experts beside a dense model of the same active size.

Both have the same attention, and a token is computed with as many weights of feed-forward parts: those of its
experts, or one of the width of them together. Both see the same bytes of the embedded corpus in the same
order. Seeds differ in initial weights and in the order.
"""

import dataclasses
from functools import partial
from typing import Any

import torch

from benchmarks.compare import Row, compare
from benchmarks.harness import timed
from echelon.data import Batches, open_corpus
from echelon.engine import Engine, parallelize
from echelon.models import ExpertsConfig, ModelConfig, build, cross_entropy

_VALIDATION_BATCHES = 8
_FRACTION = 0.05


@dataclasses.dataclass(frozen=True)
class Training:
    """How long each model is trained, and how large it is."""

    seeds: int
    steps: int
    evaluate_every: int
    batch: int
    sequence: int
    layers: int
    width: int
    hidden: int  # of an expert
    num_experts: int
    top_k: int
    learning_rate: float = 3e-3

    def config(self, contender: str) -> ModelConfig:
        dense = ModelConfig(
            "llama",
            self.layers,
            self.width,
            heads=4,
            vocab=256,
            sequence=self.sequence,
            kv_heads=2,
            ffn=self.top_k * self.hidden,
        )
        if contender == "dense":
            return dense
        experts = ExpertsConfig(self.num_experts, self.top_k, self.hidden, balance=0.01)
        return dataclasses.replace(dense, ffn=None, experts=experts)


_FULL = Training(3, 600, 50, batch=16, sequence=64, layers=2, width=64, hidden=96, num_experts=8, top_k=2)
_QUICK = Training(1, 2, 1, batch=2, sequence=16, layers=1, width=16, hidden=8, num_experts=4, top_k=2)


def bench(quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """A mixture of experts and a dense model of the same active size: loss after equal steps."""
    training = _QUICK if quick else _FULL
    rows: list[Row] = []
    curves: dict[str, list[list[float]]] = {"dense": [], "experts": []}
    for seed in range(training.seeds):
        samples, losses = {}, {}
        for contender, lines in curves.items():
            engine = _engine(training, contender, seed)
            line: list[float] = []
            samples[contender] = [timed(partial(_train, engine, training, seed, line))()]
            engine.close(restore=False)
            lines.append(line)
            losses[contender] = line[-1]
        rows += [
            dataclasses.replace(
                row, extras={"validation_loss": losses[row.contender], **_sizes(training, row.contender)}
            )
            for row in compare(f"seed {seed}", samples, "dense")
        ]
    every = training.evaluate_every
    steps = list(range(every, training.steps + 1, every))
    return dataclasses.asdict(training) | {"evaluated": steps, "curves": curves}, rows


def _sizes(training: Training, contender: str) -> dict[str, float]:
    config = training.config(contender)
    return {"parameters_count": config.num_parameters, "active_count": config.num_active_parameters}


def _engine(training: Training, contender: str, seed: int) -> Engine:
    torch.manual_seed(seed)
    return parallelize(
        build(training.config(contender)),
        "data=1",
        optimizer=partial(torch.optim.AdamW, lr=training.learning_rate, weight_decay=0.1, betas=(0.9, 0.95)),
        loss=cross_entropy,
        clip=1.0,
        schedule=lambda step: min(1.0, (step + 1) / max(1, training.steps // 10)),
        seed=seed,
        audit="off",
    )


def _train(engine: Engine, training: Training, seed: int, line: list[float]) -> None:
    """Adds the validation loss, each time that it is measured, to `line`."""
    corpus = open_corpus("stdlib", vocab=256)
    make = partial(
        Batches, corpus, batch=training.batch, sequence=training.sequence, validation_fraction=_FRACTION
    )
    batches, validation = make(seed=seed), make(seed=0, split="validation")
    for step in range(1, training.steps + 1):
        engine.step(batches.at(step - 1))
        if step % training.evaluate_every == 0:
            count = min(_VALIDATION_BATCHES, validation.num_batches)
            losses = [engine.evaluate(validation.at(index)).loss for index in range(count)]
            line.append(sum(losses) / count)
