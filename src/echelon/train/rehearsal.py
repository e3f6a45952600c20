"""A rehearsal: some steps of a schedule on local ranks, with a small GPT, to see when each instruction runs.

`echelon schedule --measure` shows it. It measures the schedule on this machine, not a training of the user's.
"""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from echelon.engine import Engine, parallelize
from echelon.launching import TRAINING_MODULES, Ranks, preload
from echelon.models import ModelConfig, Transformer, build, cross_entropy
from echelon.plan import Plan
from echelon.program import Costs, Program, Span, Timeline, simulate
from echelon.program.simulate import bubble_of, measured_costs, work_spans

Batch = tuple[Tensor, Tensor]


def make_batch(config: ModelConfig, samples: int, seed: int = 0) -> Batch:
    """Random tokens, equal in every rank with the same seed, and for each the next token."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab, (samples, config.sequence + 1), generator=generator).to(_device())
    return tokens[:, :-1], tokens[:, 1:]


def make_model(config: ModelConfig) -> Transformer:
    """A model on this rank's device, with the same weights on every rank."""
    torch.manual_seed(0)
    return build(config).to(_device())


def make_engine(config: ModelConfig, plan: Plan) -> Engine:
    return parallelize(make_model(config), plan, optimizer=fused_adamw, loss=cross_entropy)


def fused_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


def by_step(ranks: Sequence[Sequence[Sequence[Span]]]) -> list[list[Span]]:
    """The spans of all ranks together, step by step, from those of each rank."""
    return [[span for spans in step for span in spans] for step in zip(*ranks, strict=True)]


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


_LAYERS = 3  # blocks per stage; the first and the last stage have one less, for embedding and head
_WARMUP, _ROUNDS = 4, 9  # the engine meters activations in its first three steps, which makes them slower


class Rehearsal(NamedTuple):
    """The measured spans of each round, from an empty pipeline to an empty one.

    `planned` is the same program simulated with the medians of the measured costs.
    """

    rounds: Sequence[Sequence[Span]]
    costs: Costs
    planned: Timeline
    model: ModelConfig

    @property
    def bubbles(self) -> list[float]:
        return [bubble_of(round_spans, len(self.planned.program.ranks)) for round_spans in self.rounds]

    @property
    def bubble(self) -> float:
        """The median over the rounds."""
        return median(self.bubbles)

    @property
    def planned_bubble(self) -> float:
        return bubble_of(self.planned_work, len(self.planned.program.ranks))

    @property
    def planned_work(self) -> list[Span]:
        return work_spans(list(self.planned.spans()))

    @property
    def typical(self) -> list[Span]:
        """The work of the round with the median bubble; its time starts at 0."""
        _, place = min((abs(bubble - self.bubble), place) for place, bubble in enumerate(self.bubbles))
        work = work_spans(self.rounds[place])
        start = min(span.start for span in work)
        return [span._replace(start=span.start - start, end=span.end - start) for span in work]


def rehearse(plan: Plan, program: Program, batches: int = 1) -> Rehearsal:
    """Run `plan` on ranks of this machine. `program` is what one round of `batches` batches should do."""
    model = model_for(program.stages)
    preload(*TRAINING_MODULES, "echelon.train.rehearsal")
    with Ranks(plan.ranks) as ranks:
        rank_rounds = ranks.run(run_turns, plan, model, batches)
    rounds = by_step(sorted(rank_rounds, key=lambda rank_spans: rank_spans[0][0].rank))
    costs = measured_costs(rounds, program.stages)
    return Rehearsal(rounds, costs, simulate(program, costs), model)


def model_for(stages: int) -> ModelConfig:
    """A GPT that is large enough to be split into so many stages."""
    blocks = max(1, _LAYERS * stages - 2)
    return ModelConfig("gpt", layers=blocks, width=256, heads=4, vocab=256, sequence=128)


def run_turns(plan: Plan, model: ModelConfig, batches: int) -> list[list[Span]]:
    """Runs in every rank: when each instruction ran, round by round."""
    engine = make_engine(model, plan)
    batch = make_batch(model, plan.microbatches)
    rounds: list[list[Span]] = []
    for _ in range(_WARMUP + _ROUNDS):
        spans: list[Span] = []
        for _ in range(batches):
            engine.step(batch)
            spans += engine.spans
        if not plan.flushes:
            engine.synchronize()  # empties the pipeline
            spans += engine.spans
        rounds.append(spans)
    return rounds[_WARMUP:]
