"""Rehearsals: they run the very program that is shown, and their typical turn is the median one."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import preset
from echelon.models.hf.config import config_to_hf
from echelon.plan import Plan
from echelon.program import (
    COMPUTE,
    Costs,
    Instruction,
    Op,
    Program,
    Span,
    add_transfers,
    asynchronous,
    build,
    simulate,
)
from echelon.train import rehearsal
from echelon.train.rehearsal import (
    Rehearsal,
    Work,
    config_of_model,
    dry_run_of,
    model_for,
    rehearse,
    try_plans,
)

PROGRAM = build("1f1b", (1, 1), 2)


def computations(program: Program) -> list[list[Instruction]]:
    return [[instruction for instruction in rank if instruction.op in COMPUTE] for rank in program.ranks]


@pytest.mark.slow_cases("schedule=interleaved chunks=2 microbatches=2-program0-1")
@pytest.mark.parametrize(
    ("text", "program", "batches"),
    [
        ("schedule=interleaved chunks=2 microbatches=2", build("interleaved", (1, 1), 2, 2), 1),
        pytest.param(
            "schedule=pipedream microbatches=2",
            add_transfers(asynchronous("pipedream", 2, 2, taken=6)),
            3,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_turn_runs_the_program(
    text: str,
    program: Program,
    batches: int,
    warm_ranks: Callable[[int], Ranks],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rehearsal, "Ranks", lambda count: nullcontext(warm_ranks(count)))
    result = rehearse(Plan.parse(f"pipeline=2 {text}"), program, batches)

    assert len(result.rounds) == 9
    for turn in result.rounds:
        ran = [
            [span.instruction for span in turn if span.rank == rank and span.op in COMPUTE] for rank in (0, 1)
        ]
        assert ran == computations(program)
    assert result.planned.program == program
    assert result.bubble in result.bubbles


def turn(longer: float) -> list[Span]:
    return list(simulate(PROGRAM, Costs(forward=[1.0, longer], backward=1.0)).spans())


def test_the_typical_turn_has_the_median_bubble_and_starts_at_0() -> None:
    turns = [
        [span._replace(start=span.start + 7, end=span.end + 7) for span in turn(k)] for k in (3.0, 1.0, 2.0)
    ]
    result = Rehearsal(turns, Costs(), simulate(PROGRAM), model_for(2))

    assert result.bubble == sorted(result.bubbles)[1] == result.bubbles[2]
    assert min(span.start for span in result.typical) == 0
    assert max(span.end for span in result.typical) == pytest.approx(max(span.end for span in turn(2.0)))
    assert {span.op for span in result.typical} == {Op.FORWARD, Op.BACKWARD, Op.UPDATE}
    assert result.planned_bubble == pytest.approx(1 / 3)


@pytest.mark.parametrize(("stages", "blocks"), [(1, 1), (2, 4), (4, 10)])
def test_the_model_has_three_layers_a_stage(stages: int, blocks: int) -> None:
    assert model_for(stages).layers == blocks


WORK = Work(preset("gpt-tiny"), 8, 32)


def test_models_are_presets_or_folders(tmp_path: Path) -> None:
    assert config_of_model("gpt-tiny") == preset("gpt-tiny")
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(preset("llama-tiny"), "bfloat16")))
    assert config_of_model(str(tmp_path)).layers == preset("llama-tiny").layers
    assert config_of_model(str(tmp_path / "config.json")) == config_of_model(str(tmp_path))
    with pytest.raises(UserError, match="'gpt-1t' is only a shape"):
        config_of_model("gpt-1t")


def test_a_dry_run_has_the_part_of_the_batch_of_its_replica() -> None:
    halves, whole = (dry_run_of(WORK, plan, 0).memory.peak["activations"] for plan in ("data=2", "data=1"))
    assert halves == pytest.approx(whole / 2, rel=0.05)


def test_plans_run_and_those_that_cannot_say_why() -> None:
    fine, wrong = try_plans(WORK, ["data=2 zero=1", "tensor=3"], steps=1)
    assert fine.seconds is not None
    assert fine.seconds > 0
    assert fine.peak is not None
    assert fine.peak > 3 * 4 * preset("gpt-tiny").num_parameters / 2
    assert (wrong.seconds, wrong.peak) == (None, None)
    assert wrong.error
