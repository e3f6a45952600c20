"""ZeRO: its mathematics by the contract, its memory by storages, its messages by the ledger."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import echelon
from echelon.collectives import Ledger, TorchGroup
from echelon.engine import Engine
from echelon.launching import Ranks
from echelon.models import ModelConfig, build, cross_entropy
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.zero.zero import Zero
from echelon.verify import assert_equal
from tests.cases import adamw
from tests.contract_models import CASES, token_loss, tokens
from tests.sets import padded_bytes, set_of

pytestmark = pytest.mark.usefixtures("warm_contract")

Warm = Callable[[int], Ranks]

# Every model at every level, ranks and microbatches in turn, for as many steps as state needs to tell; those
# on 8 ranks by `make fuzz`, which also runs them all against all, and for twenty.
MATRIX = [
    (name, level, (2, 3, 4, 8)[(index + level) % 4], (1, 3)[(index + level // 2) % 2])
    for index, name in enumerate(CASES)
    for level in (1, 2, 3)
]


@pytest.mark.slow_cases(
    "encoder-1-3-1",
    "encoder-2-4-3",
    "gpt-1-3-1",
    "gpt-2-4-3",
    "llama-1-4-3",
    "llama-3-2-1",
    "lstm-1-2-3",
    "lstm-2-3-1",
    "lstm-3-4-1",
    "resnet-2-2-3",
    "resnet-3-3-3",
    "twice-1-4-3",
)
@pytest.mark.parametrize(
    ("name", "level", "ranks", "microbatches"),
    [pytest.param(*each, marks=[pytest.mark.slow] if each[2] == 8 else []) for each in MATRIX],
)
def test_levels_are_equal_to_one_device(name: str, level: int, ranks: int, microbatches: int) -> None:
    case = dataclasses.replace(CASES[name], steps=6, options={"smallest_unit": 0})
    assert_equal(case, f"data={ranks} zero={level} microbatches={microbatches}")


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 3])
def test_any_prefetch_depth_is_equal(prefetch: int) -> None:
    assert_equal(dataclasses.replace(CASES["gpt"], options={"prefetch": prefetch}), "data=2 zero=3")


LAYERS = 5


def deep() -> nn.Module:
    return build(ModelConfig("llama", LAYERS, 16, 2, vocab=17, sequence=8, ffn=24))


def most_units_whole(prefetch: int, microbatches: int) -> tuple[int, int, int]:
    """The most units whose storages are there at once, in training, between steps, and in evaluation."""
    from torch import distributed as dist

    model = deep()
    group = TorchGroup("data", dist.group.WORLD, Ledger())  # type: ignore[arg-type]
    sharing = Zero(set_of(model, group), 3, Wrapping(), prefetch=prefetch)
    flats = [flat.flat.untyped_storage() for flat in sharing._flats]
    seen = [0]

    def count(*_: object) -> None:
        seen[0] = max(seen[0], sum(storage.nbytes() > 0 for storage in flats))

    for module in model.modules():
        module.register_forward_pre_hook(count)
        module.register_forward_hook(count)
    for parameter in model.parameters():
        parameter.register_hook(count)
    for _ in range(2):
        sharing.start_step()
        for index in range(microbatches):
            total, _ = token_loss(model(tokens(index)[0]), tokens(index)[1])
            sharing.start_backward(last=index == microbatches - 1)
            total.backward()
            sharing.finish_backward()
        sharing.reduce()
        sharing.publish()
    training, seen[0] = seen[0], 0
    between = sum(storage.nbytes() > 0 for storage in flats)
    with torch.no_grad():
        model(tokens(0)[0])
    return training, between, seen[0]


@pytest.mark.slow_cases("0", "2")
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_at_most_prefetch_and_one_units_are_whole(warm_ranks: Warm, prefetch: int) -> None:
    for training, between, evaluation in warm_ranks(2).run(most_units_whole, prefetch, 2):
        assert training == prefetch + 1, "and no fewer: what is asked for is gathered ahead"
        assert evaluation == prefetch + 1
        assert between == 0


def moved(level: int) -> dict[tuple[str, str], int]:
    torch.manual_seed(0)
    engine = echelon.parallelize(deep(), f"data=4 zero={level}", optimizer=adamw, loss=token_loss)
    engine.step(engine.local(tokens(0)))
    engine.ledger.totals.clear()
    engine.step(engine.local(tokens(1)))
    rows = engine.ledger.rows()
    wanted = ("gradients", "parameters")
    return {(str(r["operation"]), str(r["subject"])): int(r["sent"]) for r in rows if r["subject"] in wanted}


@pytest.mark.slow_cases("1-1", "2-1", "3-2")
@pytest.mark.parametrize(
    ("level", "gathers"),
    [(0, 0), (1, 1), (2, 1), (3, 2)],
)
def test_messages_are_two_psi_and_three_psi(warm_ranks: Warm, level: int, gathers: int) -> None:
    """Each rank sends 3/4 of what the rule says for 4 ranks: (N−1)/N of 2Ψ, or of 3Ψ."""
    layers = [padded_bytes(layer) for layer in deep().layers()]  # type: ignore[operator, union-attr]
    share = sum(3 * -(-layer // 4 // 256) * 256 for layer in layers)  # parts in blocks of 256 bytes too
    for sent in warm_ranks(4).run(moved, level):
        if level == 0:
            assert sent == {("all_reduce", "gradients"): 2 * 3 * padded_bytes(deep()) // 4}
        else:
            assert sent == {
                ("reduce_scatter", "gradients"): share,
                ("all_gather", "parameters"): gathers * share,
            }


STATE = ModelConfig("gpt", 4, 640, 10, vocab=256, sequence=64)  # 20 million parameters


def model_state(plan: str) -> tuple[dict[str, int], int]:
    engine = echelon.parallelize(build(STATE), plan, optimizer=adamw, loss=cross_entropy)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(256, (engine.replicas, 8), generator=generator)
    engine.step(engine.local((batch, batch)))
    now = engine.memory().now
    return now, sum(now[category] for category in ("parameters", "gradients", "optimizer"))


STATES = list(itertools.product((2, 4, 8), range(4)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "level"),
    [pytest.param(*each, marks=[pytest.mark.slow] if each != (2, 1) else []) for each in STATES],
)
def test_model_state_takes_the_bytes_of_the_formula(ranks: int, level: int) -> None:
    """Mixed-precision Adam, bytes per parameter: 18, 6 + 12/N, 2 + 16/N, 18/N; measured from storages."""
    assert STATE.num_parameters >= 19_900_000
    wanted = [18.0, 6 + 12 / ranks, 2 + 16 / ranks, 18 / ranks][level]
    for now, state in echelon.launch(model_state, ranks, f"data={ranks} zero={level} precision=bf16"):
        assert state / STATE.num_parameters == pytest.approx(wanted, rel=0.02), (level, now)


class Fails(nn.Module):
    """Units of which one fails, forward or backward, where `fail` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 5)
        self.fail = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if index == 1 and self.fail == "forward":
                raise RuntimeError("failed on purpose")
            if index == 1 and self.fail == "backward":
                x.register_hook(self._raise)
        return self.last(x)  # type: ignore[no-any-return]

    def _raise(self, _: torch.Tensor) -> None:
        raise RuntimeError("failed on purpose")


def weights_around_a_failure(plan: str, where: str) -> bool:
    """Whether training with a failed step in the middle ends as training without it."""
    results = []
    for failing in (where, ""):
        torch.manual_seed(0)
        model = Fails()
        engine = echelon.parallelize(model, plan, optimizer=adamw, loss=CASES["twice"].loss, smallest_unit=0)
        batch = CASES["twice"].make_batch
        engine.step(engine.local(batch(0)))
        if failing:
            model.fail = failing
            with pytest.raises(RuntimeError, match="failed on purpose"):
                engine.step(engine.local(batch(1)))
            model.fail = ""
        engine.evaluate(engine.local(batch(2)))
        engine.step(engine.local(batch(2)))
        results.append(engine.full_state_dict())
    return all(torch.equal(value, results[1][name]) for name, value in results[0].items())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_a_step_that_failed_the_next_is_right(warm_ranks: Warm, level: int, where: str) -> None:
    assert warm_ranks(2).run(weights_around_a_failure, f"data=2 zero={level}", where) == [True, True]


def two_decays(parameters) -> torch.optim.Optimizer:  # type: ignore[no-untyped-def]
    """A rule over shapes: it must see whole parameters, not what a rank holds of them."""
    given = list(parameters)
    matrices, vectors = [p for p in given if p.dim() > 1], [p for p in given if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 3])
def test_rules_over_shapes_see_whole_parameters(level: int) -> None:
    assert_equal(dataclasses.replace(CASES["gpt"], make_optimizer=two_decays), f"data=2 zero={level}")


def low_precision_losses(plan: str) -> list[float]:
    torch.manual_seed(0)
    engine: Engine = echelon.parallelize(deep(), plan, optimizer=adamw, loss=token_loss)
    return [engine.step(engine.local(tokens(0))).loss for _ in range(30)]


@pytest.mark.slow_cases("3")
@pytest.mark.parametrize("level", [*(pytest.param(level, marks=pytest.mark.slow) for level in range(3)), 3])
def test_bf16_with_masters_trains_like_fp32_at_every_level(warm_ranks: Warm, level: int) -> None:
    reference = low_precision_losses("precision=fp32")
    losses = warm_ranks(2).run(low_precision_losses, f"data=2 zero={level} precision=bf16")[0]
    assert losses[-1] < reference[0] / 2
    assert losses[-1] == pytest.approx(reference[-1], abs=0.1)
