"""What a dry run says of a rank is what real ranks move and hold: the same bytes, rank by rank."""

import dataclasses
import resource
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.collectives.layout import Layout
from echelon.engine.dry_run import DryRun, dry_run
from echelon.engine.dry_run.dry_run import Bytes, bytes_of_step
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.memory import Memory
from echelon.models import Transformer, build, cross_entropy, preset
from echelon.nn.experts import routing
from echelon.plan import Plan

STEPS = 3  # the first has checks that later ones have not; in any one, the peak may be between two samples


def tiny(name: str) -> Transformer:
    torch.manual_seed(0)
    return build(dataclasses.replace(preset(name), layers=2, width=32, vocab=64, sequence=16))


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def batch_of(samples: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(64, (samples, 17), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def choose_evenly(scores: Tensor, count: int) -> Tensor:
    """As a dry run chooses experts, whose choice has no values to follow."""
    rows = torch.arange(scores[..., 0].numel()).view(*scores.shape[:-1], 1)
    return (rows + torch.arange(count)) % scores.shape[-1]


def train(name: str, plan: str, samples: int) -> tuple[list[Bytes], Memory]:
    with (
        patch.object(routing, "largest", choose_evenly),
        echelon.parallelize(
            tiny(name), plan, optimizer=adamw, loss=cross_entropy, audit="off", smallest_unit=256
        ) as engine,
    ):
        batch = engine.local(batch_of(samples))
        moved = [bytes_of_step(engine, batch) for _ in range(STEPS)]
        return moved, engine.memory()


def rehearse(name: str, plan: str, samples: int, rank: int) -> DryRun:
    parsed = Plan.parse(plan)
    replica = Layout(parsed).position(rank).replica
    inputs, targets = (part.chunk(parsed.data)[replica] for part in batch_of(samples))
    options: dict[str, Any] = {"loss": cross_entropy, "smallest_unit": 256, "check_every": 200}
    model = partial(tiny, name)
    return dry_run(model, plan, (inputs, targets), optimizer=adamw, rank=rank, steps=STEPS, **options)


PLANS = [
    ("llama-tiny", "data=2"),
    ("llama-tiny", "data=2 sync=parameter-server"),
    ("llama-tiny", "data=2 zero=1 microbatches=2"),
    ("llama-tiny", "data=2 zero=2 precision=bf16"),
    ("llama-tiny", "data=2 zero=3 recompute=full"),
    ("llama-tiny", "data=2 zero=3 update=backward"),
    ("gpt-tiny", "data=4 zero=3 shard=2"),
    ("llama-tiny", "tensor=2"),
    ("llama-tiny", "tensor=2 sequence=true recompute=selective"),
    ("gpt-tiny", "pipeline=2 microbatches=4 schedule=gpipe"),  # with a weight that two stages hold
    ("llama-tiny", "pipeline=2 microbatches=4 data=2 zero=1"),
    ("llama-tiny", "pipeline=2 chunks=2 microbatches=4 schedule=interleaved"),
    ("llama-tiny", "pipeline=2 microbatches=4 schedule=zero-bubble"),
    ("llama-tiny", "pipeline=2 microbatches=4 schedule=pipedream-2bw"),
    ("llama-tiny", "pipeline=3-1 microbatches=3"),
    ("llama-tiny", "pipeline=2 tensor=2 microbatches=3"),  # of 3, 3 and 2 samples
    ("llama-tiny", "context=2"),
    ("llama-tiny", "context=2 attention=all-to-all precision=fp64"),
    ("moe-tiny", "data=2 expert=2 microbatches=2"),
    ("moe-tiny", "data=2 expert=2 zero=3"),
    ("moe-tiny", "data=2 expert=2 pipeline=2 microbatches=2"),
    ("llama-tiny", "offload=optimizer precision=fp16"),
    ("llama-tiny", "data=2 zero=3 offload=optimizer,parameters"),
    ("llama-tiny", "offload=activations recompute=sqrt"),
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("name", "plan"), PLANS)
def test_bytes_are_those_of_real_ranks(name: str, plan: str, warm_ranks: Callable[[int], Ranks]) -> None:
    ranks = Plan.parse(plan).ranks
    real = warm_ranks(ranks).run(train, name, plan, 8) if ranks > 1 else [train(name, plan, 8)]
    for rank, (moved, memory) in enumerate(real):
        found = rehearse(name, plan, 8, rank)
        assert list(found.moved) == moved
        for category in ("parameters", "gradients", "optimizer", "buffers"):
            assert found.memory.now[category] == memory.now[category], category
            assert found.memory.peak[category] == memory.peak[category], category
        assert found.memory.host == memory.host
        # Copies run beside the computation: how many weights are there at once is a matter of time.
        near = 0.15 if "offload" in plan else 0.05
        assert found.memory.peak_total == pytest.approx(memory.peak_total, rel=near)


@pytest.mark.slow
def test_a_plan_of_1024_ranks_takes_little_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tokens = torch.zeros(2, 4096, dtype=torch.int64)
    found = dry_run(
        partial(build, "llama3-70b"),
        "data=8 tensor=8 pipeline=16 zero=1 precision=bf16 sequence=true microbatches=2",
        (tokens, tokens),
        optimizer=adamw,
        loss=cross_entropy,
        rank=150,
        steps=1,
    )
    assert found.plan.ranks == 1024
    layer = (2 * 8192 * (8192 + 1024) + 3 * 8192 * 28672) // 8  # without norms
    assert found.memory.now["parameters"] == pytest.approx(2 * 5 * layer, rel=0.01)
    assert found.memory.now["optimizer"] == pytest.approx(12 * 5 * layer / 8, rel=0.01)
    # Two microbatches forward and two gradients back, of this rank's part of the sequence.
    assert found.sent("pipeline", "send") == pytest.approx(4 * (4096 // 8) * 8192 * 2, rel=0.01)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < found.memory.now["parameters"] / 2


def test_the_model_stays_as_it_is() -> None:
    model = tiny("llama-tiny")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = dry_run(model, "tensor=2", batch_of(2), optimizer=adamw, loss=cross_entropy)
    assert found.sent("tensor") > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_program_and_plain_data_of_a_rank() -> None:
    found = rehearse("llama-tiny", "pipeline=2 microbatches=2", 4, rank=1)
    assert " ".join(found.program) == "RA0<0 F0 B0 SG0>0 RA1<0 F1 B1 SG1>0 REDUCE NORM UPDATE PUBLISH"
    data = found.to_dict()
    assert (data["plan"], data["rank"], data["ranks"]) == ("pipeline=2 microbatches=2", 1, 2)
    sends = [row for row in data["moved"][-1] if row["operation"] == "send"]
    assert [(row["axis"], row["calls"], row["sent"]) for row in sends] == [
        ("pipeline", 2, found.sent("pipeline", "send"))
    ]
    assert data["memory"]["now"] == found.memory.now


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("data=2 sync=async", "which worker is faster"),
        ("compress=gist", "how many values are zero"),
        ("compile=true", "depends on the device"),
        ("recompute=budget:1GB", "times that are measured"),
        ("pipeline=auto", "say how many"),
        ("data=1", "rank=1: must be from 0 to 0"),
    ],
)
def test_what_has_no_answer_is_refused(plan: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        dry_run(partial(tiny, "llama-tiny"), plan, batch_of(2), optimizer=adamw, loss=cross_entropy, rank=1)


def within_ranks() -> str:
    with pytest.raises(UserError) as caught:
        dry_run(partial(tiny, "llama-tiny"), "data=2", batch_of(2), optimizer=adamw, loss=cross_entropy)
    return str(caught.value)


def test_ranks_that_have_joined_are_not_replaced(warm_ranks: Callable[[int], Ranks]) -> None:
    assert all("has joined other ranks" in each for each in warm_ranks(2).run(within_ranks))
