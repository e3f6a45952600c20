"""The contenders of the bench of pipelines do the same training."""

from collections.abc import Callable

import pytest
from benchmarks.pipeline import plan_of
from torch import nn

from benchmarks import pipeline, stages
from echelon.launching import Ranks
from echelon.program import Span, build
from echelon.train.rehearsal import by_step, make_batch, make_engine, make_model


def train(schedule: str) -> tuple[list[float | None], list[float | None], int]:
    """Runs in a rank: the losses of echelon and of torch, and how many instructions echelon's step had."""
    plan, config = plan_of(schedule), pipeline._SMALL
    batch = make_batch(config, plan.microbatches)
    engine, peer = make_engine(config, plan), stages.torch_step(config, plan)
    echelon_losses = [engine.step(batch).loss for _ in range(6)]
    return list(echelon_losses), [peer(batch) for _ in range(6)], len(engine.spans)


@pytest.mark.slow_cases("gpipe", "interleaved")
@pytest.mark.parametrize("schedule", stages.PEERS)
def test_torch_does_the_same_training(schedule: str, warm_ranks: Callable[[int], Ranks]) -> None:
    (echelon_losses, nothing, _), (same, torch_losses, instructions) = warm_ranks(2).run(train, schedule)

    assert nothing == [None] * 6
    assert echelon_losses == same == pytest.approx(torch_losses, rel=1e-4)
    assert echelon_losses == sorted(echelon_losses, reverse=True)
    plan = plan_of(schedule)
    assert instructions == len(build(schedule, (1, 1), plan.microbatches, plan.chunks).ranks[1])


def test_spans_of_ranks_become_steps() -> None:
    forward, backward, *_ = build("naive", (1,), 1).ranks[0]
    first, second, third, fourth = (
        Span(rank, 0, 1, instruction) for rank in (0, 1) for instruction in (forward, backward)
    )
    assert by_step([[[first], [second]], [[third], [fourth]]]) == [[first, third], [second, fourth]]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_torch_has_the_stages_of_echelon(count: int) -> None:
    model = make_model(pipeline._SMALL)
    modules = stages._cut(model, count)
    assert len(modules) == count
    layers = [layer for module in modules for layer in module.children()]
    assert [id(layer) for layer in layers] == [id(layer) for layer in model.layers()]
    assert all(isinstance(module, nn.Sequential) and len(module) > 0 for module in modules)


def test_every_peer_is_a_schedule_that_torch_has() -> None:
    from torch.distributed import pipelining

    assert all(hasattr(pipelining, name) for name in stages.PEERS.values())
