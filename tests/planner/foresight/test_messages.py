"""Bytes that ranks send: by hand, and as the engine's ledger has them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from echelon.collectives.layout import Layout
from echelon.engine import parallelize
from echelon.engine.dry_run import dry_run
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import ModelConfig, build, cross_entropy, preset
from echelon.plan import Plan
from echelon.planner.foresight.messages import messages
from echelon.planner.shape.presets import preset_shape, shape_of
from tests.cases import adamw

Warm = Callable[[int], Ranks]

SAMPLES = 16
MODELS = {
    "gpt": replace(preset("gpt-tiny"), layers=4, width=256, heads=4, sequence=32, vocab=2048),
    "llama": replace(preset("llama-tiny"), layers=4, width=256, heads=4, kv_heads=2, sequence=32, vocab=2048),
    "moe": replace(preset("moe-tiny"), layers=4, sequence=32),
}
# Counts and flags, which are not predicted.
SMALL = {
    "agreement", "checks", "expert counts", "gate statistics", "loss counts", "metrics", "order", "samples",
    "used parameters",
}  # fmt: skip

EVERY_AXIS = (
    ("gpt", "data=8 precision=bf16"),
    ("gpt", "data=8 zero=1 precision=bf16"),
    ("gpt", "data=4 zero=2 microbatches=2 precision=bf16"),
    ("gpt", "data=8 zero=3 shard=4 precision=bf16"),
    ("gpt", "data=2 zero=3 microbatches=4 precision=bf16"),
    ("gpt", "data=4 zero=3 recompute=full precision=bf16"),
    ("gpt", "data=2 offload=parameters precision=bf16"),
    ("gpt", "data=8 zero=1 offload=optimizer precision=bf16"),
    ("gpt", "data=2 update=backward precision=bf16"),
    ("gpt", "tensor=2 sequence=true precision=bf16"),
    ("gpt", "pipeline=2 chunks=2 schedule=interleaved data=2 microbatches=4 precision=fp32"),
    ("gpt", "data=4 zero=3 pipeline=2 microbatches=4 precision=bf16"),
    ("llama", "tensor=2"),
    ("llama", "tensor=2 sequence=true data=2 precision=bf16"),
    ("llama", "pipeline=4 microbatches=8 schedule=gpipe precision=bf16"),
    ("llama", "context=4 zero=1 precision=bf16"),
    ("llama", "context=2 attention=all-to-all"),
    ("llama", "data=2 context=2 zero=2 microbatches=2"),
    ("moe", "data=2 zero=3 microbatches=2 precision=bf16"),
    ("moe", "tensor=2 sequence=true precision=bf16"),
    ("moe", "data=4 expert=4 precision=bf16"),
    ("moe", "data=4 expert=2 zero=1 precision=bf16"),
    ("moe", "data=2 expert=2 pipeline=2 microbatches=4 precision=bf16"),
    ("moe", "pipeline=4 microbatches=8 schedule=zero-bubble precision=bf16"),
)


def tokens(config: ModelConfig, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch = torch.arange(samples * config.sequence).view(samples, -1) % config.vocab
    return batch, batch


def without_small(sent: dict[tuple[str, str, str], int]) -> dict[tuple[str, str, str], int]:
    return {key: size for key, size in sent.items() if size and key[2] not in SMALL and key[0] != "host"}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("model", "text"), EVERY_AXIS)
def test_bytes_are_those_of_the_code(model: str, text: str) -> None:
    config, plan = MODELS[model], Plan.parse(text)
    for rank in {0, plan.ranks - 1}:
        run = dry_run(
            partial(build, config),
            plan,
            tokens(config, SAMPLES // plan.data),
            optimizer=adamw,
            loss=cross_entropy,
            rank=rank,
        )
        code = without_small({key: moved.sent for key, moved in run.moved[-1].items()})
        stage = Layout(plan).position(rank).pipeline
        assert messages(shape_of(config), plan, SAMPLES, stage) == code, rank


def sent_in_last_step(config: ModelConfig, text: str) -> dict[tuple[str, str, str], int]:
    with parallelize(
        build(config), text, optimizer=adamw, loss=cross_entropy, audit="off", check_every=0
    ) as engine:
        batch = engine.local(tokens(config, SAMPLES))
        for _ in range(2):
            before = {key: total.sent for key, total in engine.ledger.totals.items()}
            engine.step(batch)
        after = {key: total.sent for key, total in engine.ledger.totals.items()}
    return {key: size - before.get(key, 0) for key, size in after.items()}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("gpt", "data=2 zero=3 microbatches=2"),
        ("gpt", "pipeline=2 microbatches=4 precision=bf16"),
        ("llama", "tensor=2 sequence=true precision=bf16"),
        ("llama", "context=2 zero=1"),
        ("moe", "data=2 microbatches=2 zero=1 offload=optimizer"),
    ],
)
def test_bytes_are_those_of_ranks_that_train(warm_ranks: Warm, model: str, text: str) -> None:
    config = MODELS[model]
    for stage, sent in enumerate(warm_ranks(2).run(sent_in_last_step, config, text)):
        predicted = messages(shape_of(config), text, SAMPLES, stage if "pipeline" in text else 0)
        assert predicted == without_small(sent)


def test_experts_move_as_many_tokens_as_are_routed(warm_ranks: Warm) -> None:
    config, text = MODELS["moe"], "data=2 expert=2 microbatches=2"
    ranks = warm_ranks(2).run(sent_in_last_step, config, text)
    key = ("expert", "all_to_all", "experts")
    predicted: Any = messages(shape_of(config), text, SAMPLES)
    # A gate sends more tokens one way than the other; what one rank sends, the other gets and sends back.
    assert sum(sent[key] for sent in ranks) == pytest.approx(2 * predicted.pop(key), rel=0.5)
    for sent in ranks:
        assert {other: size for other, size in without_small(sent).items() if other != key} == predicted


def test_shards_of_gradients_that_tensor_ranks_sum_are_means() -> None:
    config, plan = MODELS["llama"], Plan.parse("data=2 tensor=2 zero=1 sequence=true precision=bf16")
    key, total = ("tensor", "all_reduce", "tied gradients"), 0
    for rank in (0, 2):  # both along `data`
        batch = tokens(config, SAMPLES // 2)
        run = dry_run(partial(build, config), plan, batch, optimizer=adamw, loss=cross_entropy, rank=rank)
        total += run.moved[-1][key].sent
    assert 2 * messages(shape_of(config), plan, SAMPLES)[key] == total


def test_sizes_by_hand() -> None:
    shape = preset_shape("llama3-8b")
    count = shape.num_parameters
    moved = messages(shape, "data=8 precision=bf16 microbatches=2", 16)
    assert moved == {("data", "all_reduce", "gradients"): 2 * 7 / 8 * 4 * count}
    assert messages(shape, "data=1 precision=bf16", 16) == {}


def test_what_a_run_decides_is_refused() -> None:
    shape = preset_shape("llama3-8b")
    for text, parts in (
        ("data=2 sync=async", ["sync=async"]),
        ("pipeline=2 schedule=pipedream microbatches=4", ["schedule=pipedream"]),
        ("tensor=2 recompute=full", ["recompute=full"]),
        ("tensor=3", ["32 heads", "8 key/value heads"]),
    ):
        with pytest.raises(UserError) as refusal:
            messages(shape, text, 16)
        assert len(refusal.value.errors) == len(parts)
        assert all(part in error for part, error in zip(parts, refusal.value.errors, strict=True))
    with pytest.raises(UserError, match="stage=4: must be from 0 to 1"):
        messages(shape, "pipeline=2", 16, 4)
