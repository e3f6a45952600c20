"""A rehearsal: some steps of a schedule on local ranks, with a small GPT, to see when each instruction runs.

`echelon schedule --measure` shows it. It measures the schedule on this machine, not a training of the user's.
"""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from echelon.launching import TRAINING_MODULES, Ranks, preload
from echelon.models import ModelConfig
from echelon.plan import Plan
from echelon.program import Costs, Program, Span, Timeline, simulate
from echelon.program.simulate import measured_costs
from echelon.program.timeline import bubble_of, work_spans
from echelon.train.small_training import by_step, make_batch, make_engine, spans_of

_LAYERS = 3  # blocks per stage; the first and the last stage have one less, for embedding and head
_WARMUP, _TURNS = 4, 9  # the engine meters activations in its first three steps, which makes them slower


class Rehearsal(NamedTuple):
    """The measured spans of each turn, from an empty pipeline to an empty one.

    `planned` is the same program simulated with the medians of the measured costs.
    """

    turns: Sequence[Sequence[Span]]
    costs: Costs
    planned: Timeline
    model: ModelConfig

    @property
    def bubbles(self) -> list[float]:
        return [bubble_of(turn, len(self.planned.program.ranks)) for turn in self.turns]

    @property
    def bubble(self) -> float:
        """The median over the turns."""
        return median(self.bubbles)

    @property
    def planned_bubble(self) -> float:
        return bubble_of(list(self.planned.spans()), len(self.planned.program.ranks))

    @property
    def planned_work(self) -> list[Span]:
        return work_spans(list(self.planned.spans()))

    @property
    def typical(self) -> list[Span]:
        """The work of the turn with the median bubble; its time starts at 0."""
        bubbles = self.bubbles
        _, place = min((abs(bubble - self.bubble), place) for place, bubble in enumerate(bubbles))
        work = work_spans(self.turns[place])
        start = min(span.start for span in work)
        return [span._replace(start=span.start - start, end=span.end - start) for span in work]


def rehearse(plan: Plan, program: Program, batches: int = 1) -> Rehearsal:
    """Run `plan` on ranks of this machine. `program` is what one turn of `batches` batches should do."""
    model = model_for(program.stages)
    preload(*TRAINING_MODULES, "echelon.train.rehearsal")
    with Ranks(plan.ranks) as ranks:
        rank_turns = ranks.run(run_turns, plan, model, batches)
    turns = by_step(sorted(rank_turns, key=lambda rank_spans: rank_spans[0][0].rank))
    costs = measured_costs(turns, program.stages)
    return Rehearsal(turns, costs, simulate(program, costs), model)


def model_for(stages: int) -> ModelConfig:
    """A GPT that is large enough to be split into so many stages."""
    blocks = max(1, _LAYERS * stages - 2)
    return ModelConfig("gpt", layers=blocks, width=256, heads=4, vocab=256, sequence=128)


def run_turns(plan: Plan, model: ModelConfig, batches: int) -> list[list[Span]]:
    """Runs in every rank: when each instruction ran, turn by turn."""
    engine = make_engine(model, plan)
    batch = make_batch(model, plan.microbatches)
    turns: list[list[Span]] = []
    for _ in range(_WARMUP + _TURNS):
        turn: list[Span] = []
        for _ in range(batches):
            engine.step(batch)
            turn += spans_of(engine)
        if not plan.flushes:
            engine.synchronize()  # empties the pipeline
            turn += spans_of(engine)
        turns.append(turn)
    return turns[_WARMUP:]
