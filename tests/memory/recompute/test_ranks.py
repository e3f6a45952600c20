"""recompute over several ranks: equal to recompute=none, and no more messages than it needs."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.launching import Ranks
from echelon.models import ModelConfig, build
from echelon.parallel.data.zero.zero import Zero
from echelon.verify import Case, assert_equal
from tests.cases import adamw
from tests.contract_models import SEQUENCE, VOCAB, class_loss, images, token_loss, tokens
from tests.instrumented import accept
from tests.memory.recompute.test_training import resnet
from tests.sets import padded_bytes

pytestmark = pytest.mark.usefixtures("warm_contract")

Warm = Callable[[int], Ranks]


def gpt() -> nn.Module:
    return build(ModelConfig("gpt", 4, 16, 2, vocab=VOCAB, sequence=SEQUENCE, dropout=0.2))


def deep() -> nn.Module:
    return build(ModelConfig("llama", 7, 16, 2, vocab=VOCAB, sequence=SEQUENCE, ffn=24))


CASE = Case(gpt, tokens, token_loss, adamw, steps=4, clip=None)

PLANS = [
    "data=2 zero=3 microbatches=2 recompute=full",
    "data=2 zero=3 recompute=sqrt",
    "pipeline=2 microbatches=4 schedule=zero-bubble recompute=full",
    "pipeline=2 microbatches=4 schedule=pipedream recompute=sqrt",
    "tensor=2 microbatches=2 recompute=full",
    "tensor=2 sequence=true recompute=sqrt",
    "context=2 recompute=full",
]
_SCHEDULES = ["naive", "gpipe", "1f1b", "interleaved chunks=2", "zero-bubble"]
_SCHEDULES += ["pipedream", "pipedream-vertical", "pipedream-2bw"]
MORE = [
    *(f"data=2 zero={level}" for level in range(4)),
    *(f"pipeline=2 microbatches=4 schedule={name}" for name in _SCHEDULES),
    "tensor=2 microbatches=2",
    "tensor=2 sequence=true",
    "context=2 attention=ring",
    "context=2 attention=all-to-all",
    "data=2 sync=parameter-server",
]
ALL = [f"{plan} recompute={kind}" for plan in MORE for kind in ("full", "sqrt")]


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases(
    "context=2 recompute=full",
    "data=2 zero=3 recompute=sqrt",
    "pipeline=2 microbatches=4 schedule=pipedream recompute=sqrt",
    "tensor=2 microbatches=2 recompute=full",
    "tensor=2 sequence=true recompute=sqrt",
)
@pytest.mark.parametrize(
    "plan", [*PLANS, *(pytest.param(plan, marks=pytest.mark.slow) for plan in ALL if plan not in PLANS)]
)
def test_plans_are_equal_to_one_device(plan: str) -> None:
    assert_equal(CASE if plan in PLANS else dataclasses.replace(CASE, steps=20), plan)


class Gathered(NamedTuple):
    """The most units that were whole at once in a step, and what it sent."""

    most_whole: int
    sent: dict[tuple[str, str], int]


def gathered(plan: str, prefetch: int) -> Gathered:
    torch.manual_seed(0)
    engine = echelon.parallelize(
        deep(), plan, optimizer=adamw, loss=token_loss, prefetch=prefetch, audit="off"
    )
    (zero,) = engine._local.sharings
    assert isinstance(zero, Zero)
    most = 0

    def count(*_: object) -> None:
        nonlocal most
        flats = (flat.flat.untyped_storage().nbytes() for flat in zero._flats)
        most = max(most, sum(size > 0 for size in flats))

    for module in engine.module.modules():
        module.register_forward_pre_hook(count)
        module.register_forward_hook(count, always_call=True)
    for parameter in engine.module.parameters():
        parameter.register_hook(count)
    accept(engine)
    engine.step(engine.local(tokens(0)))
    most = 0
    engine.ledger.totals.clear()
    engine.step(engine.local(tokens(1)))
    rows = engine.ledger.rows()
    wanted = ("gradients", "parameters")
    sent = {(str(r["operation"]), str(r["subject"])): int(r["sent"]) for r in rows if r["subject"] in wanted}
    engine.close()
    return Gathered(most, sent)


def share_of(layer: nn.Module) -> int:
    """What one of two ranks sends to gather a unit: its part, in blocks of 256 bytes."""
    return -(-padded_bytes(layer) // 2 // 256) * 256


@pytest.mark.slow_cases("0", "1")
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_unit_is_gathered_once_for_its_second_run_and_its_backward_pass(
    warm_ranks: Warm, prefetch: int
) -> None:
    psi = sum(map(share_of, deep().layers()))  # type: ignore[operator, union-attr]
    for most, sent in warm_ranks(2).run(gathered, "data=2 zero=3 recompute=full", prefetch):
        assert most == prefetch + 1
        assert sent == {("reduce_scatter", "gradients"): psi, ("all_gather", "parameters"): 2 * psi}


def test_layers_of_a_longer_segment_are_gathered_once_more(warm_ranks: Warm) -> None:
    """Nine layers in segments of three: the last of each is there already, and the last segment stays."""
    shares = [share_of(layer) for layer in deep().layers()]  # type: ignore[operator, union-attr]
    again = sum(shares[index] for index in (0, 1, 3, 4))
    ahead = shares[1] + shares[4]  # gathered for the backward pass, and given back for the second run
    for most, sent in warm_ranks(2).run(gathered, "data=2 zero=3 recompute=sqrt", 1):
        assert most == 2
        assert sent["all_gather", "parameters"] == 2 * sum(shares) + again + ahead
        assert sent["reduce_scatter", "gradients"] == sum(shares)


def batch_norm_messages(plan: str) -> tuple[dict[str, Tensor], int]:
    torch.manual_seed(0)
    engine = echelon.parallelize(resnet().double(), plan, optimizer=adamw, loss=class_loss)
    for step in range(2):
        engine.step(engine.local(images(step)))
    sent = sum(int(row["sent"]) for row in engine.ledger.rows() if row["subject"] == "batch norm")
    state = engine.full_state_dict()
    engine.close()
    return state, sent


def test_replicas_send_statistics_once(warm_ranks: Warm) -> None:
    (expected, sent), _ = warm_ranks(2).run(batch_norm_messages, "data=2 precision=fp64")
    for recompute in ("full", "sqrt"):
        plan = f"data=2 precision=fp64 recompute={recompute}"
        for state, again in warm_ranks(2).run(batch_norm_messages, plan):
            assert again == sent > 0
            assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
