"""Stages that run the model's own forward: what they skip, what they refuse, and equality with one device."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.errors import UserError
from echelon.nn.layering import name_layers
from echelon.nn.wrapping import Wrapping
from echelon.parallel.called_stage import AbsentTensor, CalledStage, CountedLayer
from echelon.parallel.pipeline import even_boundaries, split_model
from echelon.verify import Case, assert_equal
from tests.cases import adamw, mean_loss, vectors
from tests.unlisted_models import Diffusion, Lightning, NanoGPT, case, noisy, tokens

PIPELINES = ((NanoGPT, "transformer.h"), (Lightning, None), (Diffusion, "blocks"))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("model", "layers"), PIPELINES)
def test_stages_train_as_one_device(model: Any, layers: str | None) -> None:
    assert_equal(case(model, layers=layers), "pipeline=2 microbatches=2")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("model", "layers"), PIPELINES)
@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=2 data=2 zero=3 microbatches=2",
        "pipeline=2 data=2 zero=1 microbatches=2 recompute=full",
        "pipeline=2 microbatches=4 schedule=zero-bubble",
    ],
)
def test_stages_compose(model: Any, layers: str | None, plan: str) -> None:
    assert_equal(case(model, layers=layers), plan)


@pytest.mark.slow
def test_every_layer_may_be_a_stage() -> None:
    assert_equal(case(NanoGPT, layers="transformer.h"), "pipeline=4 microbatches=4 schedule=gpipe")


class Loop(nn.Module):
    """Layers alone: in several stages of one rank there may be no weights around them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def test_a_rank_may_have_several_stages() -> None:
    # Each layer told the last one alone of its calls, and stages called layers that this rank does not have.
    plan = "pipeline=2 chunks=2 schedule=interleaved microbatches=2"
    assert_equal(Case(Loop, vectors, mean_loss, adamw, steps=3, options={"layers": "blocks"}), plan)


def make_stages(model: nn.Module, layers: str, number: int = 2) -> list[CalledStage]:
    name_layers(model, layers)
    stages = split_model(model, even_boundaries(model, number)).stages
    assert all(isinstance(stage, CalledStage) for stage in stages)
    return list(stages)  # type: ignore[arg-type]


def run(stages: Sequence[CalledStage], *inputs: Tensor) -> Any:
    """Run one stage after the other, each with its own view of the layers."""
    value: Any = None
    for number, stage in enumerate(stages):
        stage.inputs = echelon.Inputs(*inputs)
        with Wrapping() as wrapping:
            for place, layer in enumerate(stage.all_layers):
                wrapping.wrap(CountedLayer(layer, stages, place))
            value = stage(*inputs) if number == 0 else stage(value)
    return value


def test_stages_after_each_other_are_the_forward() -> None:
    model, (inputs, _) = NanoGPT(), tokens(0)
    assert torch.equal(run(make_stages(model, "transformer.h", 4), inputs), model(inputs))
    diffusion, batch = Diffusion(), noisy(0)
    made = run(make_stages(diffusion, "blocks"), batch["x"], batch["t"])
    assert torch.equal(made, diffusion(batch["x"], batch["t"]))


def test_a_stage_has_its_layers_and_all_that_is_in_none() -> None:
    first, second = make_stages(Diffusion(), "blocks")
    names = {name for name, _ in first.named_parameters()}
    assert {name.split(".")[0] for name in names} == {"x_embedder", "t_embedder", "blocks", "final_layer"}
    assert {name.split(".")[1] for name in names if name.startswith("blocks")} == {"0", "1"}
    assert {name for name, module in second.named_modules() if module in second.layers()} == {
        "blocks.2",
        "blocks.3",
    }


class Chain(nn.Module):
    """Four layers, called as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(6))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.norm(x) if self.kind == "norm" else x * self.scale
        order = {"reversed": [0, 2, 1, 3], "twice": [0, 0, 1, 2, 3], "short": [0, 1, 2]}
        kept = []
        for number in order.get(self.kind, range(4)):
            x = torch.tanh(self.blocks[number](x))
            kept.append(x)
            if self.kind == "shape" and x.shape[1] == 7:
                x = x[:, :6]
            if self.kind == "skip" and number == 2:
                x = x + kept[0]
            if self.kind == "first":
                x = x + first
        return torch.stack(kept) if self.kind == "all" else x


def test_code_between_layers_runs_where_its_values_are() -> None:
    model, x = Chain("first"), torch.randn(5, 6)
    assert torch.equal(run(make_stages(model, "blocks"), x), model(x))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("skip", "makes an argument of layer 3 of what a layer of an earlier stage has returned"),
        ("all", "makes what it returns of what a layer of an earlier stage has returned"),
        ("reversed", "calls layer 2, where layer 1 was to follow"),
        ("twice", "calls layer 0, where layer 1 was to follow"),
        ("short", "calls 3 of its 4 layers in their order, and ends"),
        ("shape", "uses, between its layers, what a layer of another stage has returned"),
    ],
)
def test_a_forward_that_no_stages_can_run_is_refused(kind: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        run(make_stages(Chain(kind), "blocks"), torch.randn(5, 6))


def test_functions_of_what_is_absent_are_absent() -> None:
    absent, here = AbsentTensor.make(), torch.ones(3)
    assert isinstance((absent + here).tanh() @ here, AbsentTensor)
    assert isinstance(torch.cat([here, absent]), AbsentTensor)
    for question in (len, bool, float, list):
        with pytest.raises(UserError, match="between its layers"):
            question(absent)
    with pytest.raises(UserError, match="between its layers"):
        here[0] = absent
    with pytest.raises(UserError, match="between its layers"):
        here.add_(absent)


def refusal(kind: str, plan: str) -> str:
    """In a rank: what is refused, at the start or in the first step."""
    x, targets = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3])
    try:
        engine = echelon.parallelize(
            Chain(kind), plan, optimizer=adamw, loss=mean_loss, layers="blocks", audit="off"
        )
        engine.step((x, targets))
    except UserError as error:
        return str(error)
    return ""


def test_buffers_that_change_outside_of_layers_are_refused_on_every_rank(warm_ranks: Any) -> None:
    errors = warm_ranks(2).run(refusal, "norm", "pipeline=2")
    assert len(errors) == 2
    assert all("the forward changes norm.running_mean" in error for error in errors)


def test_stages_that_never_drain_are_refused(warm_ranks: Any) -> None:
    errors = warm_ranks(2).run(refusal, "", "pipeline=2 schedule=pipedream microbatches=2")
    assert all("schedule=pipedream" in error and "schedule=1f1b" in error for error in errors)
