"""pipeline=auto: how many ranks there are to split, what is asked for, and that all ranks agree."""

import io
import os
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
from torch import nn

import echelon
from echelon.engine import auto
from echelon.engine.auto import (
    Task,
    chosen,
    ranks_here,
    refusal,
    resolve,
    shape_of_sample,
    without_memory,
)
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import build, cross_entropy, preset
from echelon.plan import Plan
from tests.cases import vectors

Warm = Callable[[int], Ranks]

AUTO = Plan.parse("pipeline=auto microbatches=2")


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def test_a_plan_that_says_its_stages_stays_as_it_is() -> None:
    plan = Plan.parse("pipeline=3-1 microbatches=2")
    assert resolve(model(), plan, None, [1]) == (plan, [1])


def test_measuring_takes_a_batch() -> None:
    with pytest.raises(
        UserError, match=r"pipeline=auto: .*sample_batch=\(inputs, targets\), or say the stages"
    ):
        resolve(model(), AUTO, None, None)


def test_on_one_rank_there_is_one_stage() -> None:
    plan = Plan.parse("microbatches=2")
    assert resolve(model(), AUTO, vectors(0), None) == (plan, None)


@pytest.mark.parametrize(
    ("replicas", "layers", "plan", "boundaries"),
    [
        ([1, 1], [2, 3], "pipeline=2 microbatches=2", [2]),
        ([3, 1, 1], [2, 3, 4], "pipeline=3-1-1 microbatches=2", [2, 5]),
        ([4], [9], "data=4 microbatches=2", None),
    ],
)
def test_a_partition_becomes_a_plan(
    replicas: list[int], layers: list[int], plan: str, boundaries: Sequence[int] | None
) -> None:
    assert auto._resolved(AUTO, replicas, layers) == (Plan.parse(plan), boundaries)


def test_one_stage_of_replicas_multiplies_those_of_the_plan() -> None:
    plan = Plan.parse("pipeline=auto data=2")
    assert auto._resolved(plan, [3], [9])[0] == Plan.parse("data=6")


def test_the_pipeline_takes_the_ranks_that_other_axes_leave() -> None:
    plan = Plan.parse("pipeline=auto data=2 tensor=2 context=2")
    assert auto._workers(plan, 16) == 2
    with pytest.raises(UserError, match=r"data × tensor × context = 8 leaves.*; start 8 ranks"):
        auto._workers(plan, 12)
    with pytest.raises(UserError, match="start 8 ranks"):
        auto._workers(plan, 4)


@pytest.mark.parametrize(
    ("plan", "cores", "expected"),
    [
        ("data=2 tensor=2", 64, 4),
        ("pipeline=auto", 6, 6),
        ("pipeline=auto data=2 tensor=2", 7, 4),
        ("pipeline=auto data=4", 2, 4),
    ],
)
def test_as_many_ranks_as_devices_that_the_other_axes_divide(
    monkeypatch: pytest.MonkeyPatch, plan: str, cores: int, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert ranks_here(Plan.parse(plan)) == expected


def test_versions_and_gathered_weights_have_no_replicas_of_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    class Split:
        replicas, layer_counts = (1, 1), (1, 2)

    def partition(*_: Any, straight: bool) -> type[Split]:
        asked.append(straight)
        return Split

    monkeypatch.setattr(auto, "partition", partition)
    monkeypatch.setattr(auto, "profile", lambda *_: None)
    for options in ("", " schedule=pipedream", " zero=3 data=2"):
        plan = Plan.parse(f"pipeline=auto microbatches=2{options}")
        auto._choose(model(), plan, vectors(0), 2, 1e9, torch.device("cpu"))
    assert asked == [False, True, True]


def test_layers_are_measured_on_one_microbatch_of_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def profile(_: nn.Module, batch: Any) -> None:
        sizes.append(len(batch[0]))
        raise StopIteration

    monkeypatch.setattr(auto, "profile", profile)
    plan = Plan.parse("pipeline=auto microbatches=3 data=2")
    with pytest.raises(StopIteration):
        auto._choose(model(), plan, vectors(0), 2, 1e9, torch.device("cpu"))
    assert sizes == [2], "of 12 samples"


def resolved_here(replicas: list[int], layers: list[int]) -> tuple[str, list[int] | None]:
    """Rank 0 measures and chooses these; the others would choose something else."""
    choose = auto._choose

    def choice(*_: Any) -> dict[str, Any]:
        assert torch.distributed.get_rank() == 0, "ranks measure differently, so that one measures for all"
        return {"replicas": replicas, "layers": layers}

    auto._choose = choice
    try:
        plan, boundaries = resolve(model(), AUTO, vectors(0), None)
    finally:
        auto._choose = choose
    return str(plan), None if boundaries is None else list(boundaries)


@pytest.mark.parametrize(
    ("replicas", "layers", "expected"),
    [([1, 1], [1, 2], ("pipeline=2 microbatches=2", [1])), ([2], [3], ("data=2 microbatches=2", None))],
)
def test_all_ranks_have_what_the_first_one_chose(
    warm_ranks: Warm, replicas: list[int], layers: list[int], expected: tuple[str, list[int] | None]
) -> None:
    plan, boundaries = expected
    assert warm_ranks(2).run(resolved_here, replicas, layers) == [(str(Plan.parse(plan)), boundaries)] * 2


def measured_here() -> int:
    return resolve(model(), AUTO, vectors(0), None)[0].ranks


def test_layers_are_measured_and_split_over_all_ranks(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(measured_here) == [2, 2]


class Layerless(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def layerless_refusal() -> str:
    with pytest.raises(UserError) as caught:
        resolve(Layerless(), AUTO, vectors(0), None)
    return str(caught.value)


def test_what_the_first_rank_finds_wrong_is_an_error_on_every_rank(warm_ranks: Warm) -> None:
    first, second = warm_ranks(2).run(layerless_refusal)
    assert first == second
    assert "Layerless does not say where it can be cut" in first


# Plan "auto": chosen for the model, the batch and the ranks that are here; all ranks agree on it.

TOKENS = torch.zeros(8, 64, dtype=torch.int64)
BATCH = (TOKENS, TOKENS)


def task(model: nn.Module) -> Task:
    return Task(model, cross_entropy, None, None, None)


class Block(nn.Module):
    """A layer of a model that nobody has listed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.mix(self.norm(x)).chunk(3, -1)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.norm(x))))


class OwnModel(nn.Module):
    def __init__(self, width: int = 32, vocab: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_plan_that_says_its_words_stays() -> None:
    assert chosen("data=2", task(OwnModel()), None) == "data=2"


def test_the_shape_is_that_of_the_batch() -> None:
    shape, batch = shape_of_sample(task(build("gpt-tiny")), BATCH)
    assert (shape.sequence, batch, shape.layers) == (64, 8, preset("gpt-tiny").layers)


def test_a_model_of_ones_own_has_a_shape_from_a_trace() -> None:
    model = OwnModel()
    shape, _ = shape_of_sample(task(model), BATCH)
    assert (shape.layers, shape.hidden, shape.heads, shape.sequence) == (3, 32, 4, 64)
    assert shape.num_parameters == sum(each.numel() for each in model.parameters())


def test_a_copy_has_shapes_and_no_memory_and_the_model_stays() -> None:
    model = OwnModel()
    copy = without_memory(model)
    assert {each.device.type for each in copy.parameters()} == {"meta"}
    assert [each.shape for each in copy.parameters()] == [each.shape for each in model.parameters()]
    assert {each.device.type for each in model.parameters()} == {"cpu"}


def test_what_a_model_cannot_be_divided_by_is_said() -> None:
    own = task(OwnModel())
    assert refusal(own, "data=2 zero=3") is None
    assert refusal(own, "tensor=2") is not None
    assert refusal(task(build("gpt-tiny")), "tensor=2 sequence=true") is None
    assert "heads" in str(refusal(task(build("gpt-tiny")), "tensor=8"))


def test_a_batch_is_needed() -> None:
    with pytest.raises(UserError, match=r"plan 'auto': .*sample_batch="):
        chosen("auto", task(OwnModel()), None)
    with pytest.raises(UserError, match="is for 3 ranks, and 1 are running"):
        chosen("auto ranks=3", task(OwnModel()), BATCH)


def test_a_model_without_attention_is_told_what_it_can_have() -> None:
    with pytest.raises(UserError, match="no stack of transformer layers"):
        chosen(
            "auto", Task(nn.Linear(4, 4), nn.functional.mse_loss, None, None, None), (torch.ones(8, 4),) * 2
        )


def train(plan: str, own: bool) -> tuple[str, float, float, str]:
    torch.manual_seed(0)
    model, printed = OwnModel() if own else build("gpt-tiny"), io.StringIO()
    with (
        redirect_stderr(printed),
        echelon.parallelize(
            model,
            plan,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            loss=cross_entropy,
            sample_batch=BATCH,
        ) as engine,
    ):
        for _ in range(2):
            loss = engine.step(engine.local(BATCH)).loss
        return str(engine.mesh.plan), float(loss), sum(engine.memory().peak.values()), printed.getvalue()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("own", [False, True])
def test_ranks_agree_and_the_printed_plan_gives_the_same(warm_ranks: Warm, own: bool) -> None:
    first, second = warm_ranks(2).run(train, "auto", own)
    assert first[:2] == second[:2]
    assert (first[3].count(f'plan="{first[0]}"'), second[3]) == (1, "")
    again = warm_ranks(2).run(train, first[0], own)[0]
    assert again[1] == first[1]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "words"), [(2, " data=2"), (2, ""), (4, "")])
def test_a_limit_of_memory_is_kept_where_the_unsharded_plan_does_not_fit(
    warm_ranks: Warm, ranks: int, words: str
) -> None:
    plain = warm_ranks(ranks).run(train, f"data={ranks}", False)
    limit = int(0.8 * max(each[2] for each in plain))
    limited = warm_ranks(ranks).run(train, f"auto memory={limit}{words}", False)
    plan = Plan.parse(limited[0][0])
    assert plan.ranks == ranks
    assert plan.zero or plan.tensor > 1 or plan.stages > 1
    assert max(each[2] for each in limited) < limit
    assert limited[0][1] == pytest.approx(plain[0][1], rel=1e-4)  # the loss after an update
