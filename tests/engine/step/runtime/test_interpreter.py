"""What happens inside a step: the order of instructions, the bytes that are moved, and what is left."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives.work import EventClock
from echelon.engine.step.runtime.message import Spec, layout
from echelon.launching import Ranks
from echelon.plan import Plan
from echelon.program import Instruction, build
from tests.cases import vectors
from tests.collectives.fake_device import FakeDevice
from tests.engine.step.runtime.watched_engine import engine_for

Warm = Callable[[int], Ranks]


# The order.


def spans_of(plan: str) -> tuple[list[Instruction], bool, float, float]:
    engine = engine_for(plan)
    engine.step(engine.local(vectors(0)))
    metrics = engine.step(engine.local(vectors(1)))
    spans = engine.spans
    times = [time for span in spans for time in (span.start, span.end)]
    return [span.instruction for span in spans], times == sorted(times), times[-1] - times[0], metrics.seconds


@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=2 microbatches=3",
        "pipeline=2 microbatches=2 schedule=interleaved chunks=2",
        "pipeline=2 microbatches=3 schedule=zero-bubble",
    ],
)
def test_every_instruction_is_executed_once_and_in_order(warm_ranks: Warm, plan: str) -> None:
    instruction = Plan.parse(plan)
    program = build(instruction.schedule, instruction.replicas, instruction.microbatches, instruction.chunks)
    for rank, (instructions, in_order, seconds, of_step) in enumerate(warm_ranks(2).run(spans_of, plan)):
        assert instructions == list(program.ranks[rank])
        assert in_order
        assert 0 < seconds < of_step


def test_a_step_marks_its_instructions_on_the_clock_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of the host, which queues work and goes on, were given for those of a GPU."""
    device = FakeDevice()
    monkeypatch.setattr("echelon.engine.step.runtime.interpreter.clock_of", lambda _: EventClock(device))
    engine = engine_for("microbatches=2 schedule=gpipe")
    synchronized = device.synchronized
    engine.step(vectors(0))
    assert device.synchronized == synchronized, "nothing waits in a step"
    assert [span.instruction for span in engine.spans] == list(build("gpipe", (1,), 2).ranks[0])
    assert device.synchronized > synchronized


def last_rounds(plan: str) -> list[bool]:
    """Of each backward pass that this rank takes part in, whether its strategy is told it is the last."""
    engine = engine_for(plan, audit="off")
    (sharing,) = engine._local.sharings
    begin, told = sharing.start_backward, list[bool]()

    def start_backward(*, last: bool) -> None:
        told.append(last)
        begin(last=last)

    sharing.start_backward = start_backward  # type: ignore[method-assign]
    engine.step(engine.local(vectors(0)))
    engine.close()
    return told


def test_the_last_round_of_replicas_in_step_is_the_same_for_all(warm_ranks: Warm) -> None:
    """The second replica has one microbatch, and makes up for a round. Its own backward pass was said to be
    the last too: what replicas do in their last round alone would have met another round's."""
    plan = "pipeline=2-1 zero=2 microbatches=3"
    assert warm_ranks(3).run(last_rounds, plan) == [[False, True], [False, True], [False, False, True]]


# Bytes.


def moved(plan: str, steps: int) -> list[list[tuple[str, int]]]:
    """What this rank sent and received between stages, step by step."""
    engine = engine_for(plan)
    steps_moves = []
    for step in range(steps):
        engine.step(engine.local(vectors(step)))
        moves = [move for move in engine.ledger.moves if move.subject == "activations"]
        assert {move.axis for move in moves} == {"pipeline"}
        steps_moves.append([(move.operation, move.traffic.payload) for move in moves])
    engine.synchronize()  # or messages would wait for the next test
    return steps_moves


def counts(moves: list[tuple[str, int]]) -> dict[tuple[str, int], int]:
    return {move: moves.count(move) for move in dict.fromkeys(moves)}


def message() -> tuple[int, int]:
    """Three of twelve samples of six float32 numbers: the bytes of a message, and of its description."""
    spec, _ = Spec.of(torch.zeros(3, 6, requires_grad=True))
    return layout(spec.leaves, head_inside=True).size, len(spec.text)


def test_the_ledger_has_every_message_with_its_bytes(warm_ranks: Warm) -> None:
    size, text = message()
    assert size == 16 + 80
    first, second = warm_ranks(2).run(moved, "pipeline=2 microbatches=4", 3)
    for forward, backward, steps in (("send", "recv", first), ("recv", "send", second)):
        described = {(forward, 8): 4, (forward, text): 4, (forward, size): 4, (backward, size): 4}
        assert counts(steps[0]) == described
        assert counts(steps[1]) == counts(steps[2]) == {(forward, size): 4, (backward, size): 4}


def test_an_endless_pipeline_moves_as_many(warm_ranks: Warm) -> None:
    size, _ = message()
    first, second = warm_ranks(2).run(moved, "pipeline=2 microbatches=4 schedule=pipedream", 3)
    with_tally = size + 32  # loss total, count, what losses were divided by; messages are padded
    assert counts(first[2]) == {("send", size): 4, ("recv", with_tally): 4}
    assert counts(second[2]) == {("recv", size): 4, ("send", with_tally): 4}


class Numbering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.linear(x)
        return x, torch.arange(len(x)), x.detach()


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, numbers, constant = given
        return self.linear(x + constant) * numbers.unsqueeze(1)  # type: ignore[no-any-return]


def moved_with_numbers(plan: str) -> list[tuple[str, int]]:
    # Numbers within the microbatch: the audit would call that mixed samples.
    engine = engine_for(plan, nn.Sequential(Numbering(), Numbered()), audit="off")
    for step in range(2):
        engine.step(vectors(step))
    return [(m.operation, m.traffic.payload) for m in engine.ledger.moves if m.subject == "activations"]


def test_what_wants_no_gradient_goes_one_way_only(warm_ranks: Warm) -> None:
    first = warm_ranks(2).run(moved_with_numbers, "pipeline=2 microbatches=4")[0]
    forward = 16 + 80 + 32 + 80  # three samples: six numbers of 4 bytes, one of 8, six of 4; each up to 16
    assert counts(first) == {("send", forward): 4, ("recv", 16 + 80): 4}


# Afterwards.


def left_over(plan: str) -> list[int]:
    engine = engine_for(plan)
    engine.step(engine.local(vectors(0)))
    engine.evaluate(engine.local(vectors(0)))
    interpreter = engine._runner._interpreter
    held = [interpreter._inputs, interpreter._outputs, interpreter._flights, interpreter._gradients]
    return [len(instruction) for instruction in [*held, interpreter._returning]]


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "pipedream"])
def test_nothing_is_left_behind(warm_ranks: Warm, schedule: str) -> None:
    for left in warm_ranks(2).run(left_over, f"pipeline=2 microbatches=3 schedule={schedule}"):
        assert left == [0] * 5


class Doubled(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) if self.inplace else x * 2


def test_a_stage_may_change_what_a_stage_of_the_same_rank_made(tmp_path: Path) -> None:
    """The first stage needs its own output in its backward pass. It is a copy, as between two ranks."""
    file = tmp_path / "two_stages.txt"
    file.write_text("stage 0: 0\nstage 1: 0\nrank 0: F0@0 F0@1 B0@1 B0@0\n")
    norms = []
    for inplace in (False, True):
        torch.manual_seed(0)
        first, second = nn.Linear(6, 6), nn.Linear(6, 5)
        stages = [nn.Sequential(first, nn.Tanh()), nn.Sequential(Doubled(inplace), second)]
        engine = engine_for(f"schedule={file}", nn.Sequential(*stages), audit="off")
        norms.append(engine.step(vectors(0)).grad_norm)
    assert norms[0] == norms[1] > 0


def labels_at_each_instruction() -> tuple[list[str], list[str]]:
    """What a report of a hang would call each instruction of a step, and what the step leaves behind."""
    texts: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("echelon.engine.step.runtime.interpreter.at_instruction", texts.append)
        engine = engine_for("pipeline=2 microbatches=2 schedule=gpipe", audit="off")
        engine.step(engine.local(vectors(0)))
    return texts[:-1], texts[-1:]


def test_a_hang_can_be_named_by_its_instruction(warm_ranks: Warm) -> None:
    (first, after), (second, _) = warm_ranks(2).run(labels_at_each_instruction)
    begin = ("F0 of stage 0, microbatch 0", "SA0 of stage 0, microbatch 0", "F1 of stage 0, microbatch 1")
    assert tuple(first[:3]) == begin
    assert second[:2] == ["RA0 of stage 1, microbatch 0", "F0 of stage 1, microbatch 0"]
    assert "RG1 of stage 0, microbatch 1" in first
    assert "REDUCE of stage 0" in first
    assert after == [""]
