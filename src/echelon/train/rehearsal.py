"""Rehearsals on local ranks, with made-up weights and tokens: what a schedule and a plan take here.

A small GPT runs some steps of a schedule (`echelon schedule --measure`): it measures the schedule on this
machine, not a training of the user's. A model of the size of a prediction runs a plan, or one rank of it dry
(`echelon plan --measure`, `--dry-run`).
"""

import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from echelon.engine import Engine, parallelize
from echelon.engine.dry_run import DryRun, dry_run
from echelon.errors import UserError, did_you_mean
from echelon.launching import TRAINING_MODULES, RankFailed, Ranks, preload
from echelon.models import ModelConfig, Transformer, build, cross_entropy, preset, presets, read_hf_config
from echelon.nn.initialization.initial_values import deferred
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


_WARM = 4  # the engine meters activations in its first three steps, which makes them slower


class Work(NamedTuple):
    """A step: the model, and sequences over all replicas."""

    config: ModelConfig
    batch: int
    sequence: int

    def tokens(self, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.zeros(samples, self.sequence, dtype=torch.int64)
        return tokens, tokens


class Trial(NamedTuple):
    """What a plan took on ranks that are here; or why it could not be run."""

    plan: str
    seconds: float | None
    peak: int | None
    error: str = ""


def config_of_model(name: str) -> ModelConfig:
    """The sizes of a preset, or of a folder of Hugging Face. A UserError says why it is only a shape."""
    path = Path(name)
    if name in presets():
        return preset(name)
    if not path.exists():
        raise UserError(
            f"'{name}' is only a shape, which cannot be built{did_you_mean(name, presets())}; drop --dry-run "
            "and --measure"
        )
    return read_hf_config(str(path if path.is_dir() else path.parent))


def dry_run_of(work: Work, text: str, rank: int) -> DryRun:
    """The steps of one rank of a plan, by the code that would run them."""
    plan = Plan.parse(text)
    batch = work.tokens(work.batch // plan.data)
    return dry_run(partial(build, work.config), plan, batch, optimizer=_adamw, loss=cross_entropy, rank=rank)


def try_plans(work: Work, plans: Iterable[str], steps: int = 5) -> list[Trial]:
    """Run each plan on ranks of its own, which end with it: what one leaves in memory, no other has."""
    return [_try(work, plan, steps) for plan in plans]


def _try(work: Work, text: str, steps: int) -> Trial:
    try:
        with Ranks(Plan.parse(text).ranks) as ranks:
            times = ranks.run(time_steps, work, text, steps)
    except (UserError, RankFailed) as error:
        return Trial(text, None, None, str(error).splitlines()[0])
    return Trial(text, max(seconds for seconds, _ in times), max(peak for _, peak in times))


def time_steps(work: Work, text: str, steps: int) -> tuple[float, int]:
    """The median seconds of a step, and the bytes at the peak, on one rank of a plan."""
    torch.manual_seed(0)
    model = deferred(partial(build, work.config))
    with parallelize(model, text, optimizer=_adamw, loss=cross_entropy, audit="off", check_every=0) as engine:
        batch = engine.local(work.tokens(work.batch))
        times = []
        for _ in range(_WARM + steps):
            start = time.perf_counter()
            float(engine.step(batch).loss)  # read, so that the step has ended
            times.append(time.perf_counter() - start)
        return median(times[_WARM:]), engine.memory().peak_total


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)
