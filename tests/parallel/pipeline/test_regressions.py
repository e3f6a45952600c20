"""Trainings that once went wrong, each with its story."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from echelon import UserError
from echelon.program import flushed, show
from echelon.verify import Case, assert_equal, verify
from tests.cases import adamw, sgd

pytestmark = pytest.mark.usefixtures("warm_contract")

Make = Callable[[], nn.Module]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def three_ties() -> nn.Module:
    """The first layer shares one matrix with the second and, before and after it, two with the third."""
    first, second, third = (nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))) for _ in range(3))
    second[1].weight = first[1].weight
    third[0].weight, third[2].weight = first[0].weight, first[2].weight
    return nn.Sequential(first, second, third)


def halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


class Hooked(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(halve)
        return torch.tanh(y)


class ChangesItsInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.relu_(x))  # type: ignore[no-any-return]


def four(block: type[nn.Module] = Block) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), block(), block(), nn.Linear(8, 5))


def eight() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *(Block() for _ in range(6)), nn.Linear(8, 5))


def checkpointed() -> nn.Module:
    return four(Checkpointed)


def hooked() -> nn.Module:
    return four(Hooked)


def hooked_weights() -> nn.Module:
    """Of the second stage: the first has no inputs, and is never cut in two."""
    model = four()
    for parameter in model[2:].parameters():
        parameter.register_hook(halve)
    return model


def in_place() -> nn.Module:
    return four(ChangesItsInput)


def in_place_later() -> nn.Module:
    layers = [nn.Linear(6, 8), nn.Linear(8, 8), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(8, 5)]
    return nn.Sequential(*layers)


def without_weights_in_a_stage() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 5))


def frozen_first_stage() -> nn.Module:
    model = four()
    model[:2].requires_grad_(False)  # type: ignore[index]
    return model


class Listed(nn.Module):
    def layers(self) -> list[nn.Module]:
        raise NotImplementedError

    def forward(self, x: Any) -> Any:
        for layer in self.layers():
            x = layer(x)
        return x


class Crossed(Listed):
    """Layers 0 and 3 share a weight, and so do 1 and 2."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.linears[3].weight = self.linears[0].weight
        self.linears[2].weight = self.linears[1].weight

    def layers(self) -> list[nn.Module]:
        return list(self.linears)


class HoldsAWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(6, 6), nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


class UsesAWeight(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class UsedElsewhere(Listed):
    """The stage that counts the shared weight in the norm does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = HoldsAWeight()
        self.last = UsesAWeight(self.first.weight)

    def layers(self) -> list[nn.Module]:
        return [self.first, self.last]


class WithBufferOfItsOwn(Listed):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.register_buffer("top", torch.ones(3))
        self.first.register_buffer("flags", torch.tensor([True, False]))
        self.last.register_buffer("small", torch.tensor([3], dtype=torch.int16))

    def layers(self) -> list[nn.Module]:
        return [self.first, self.last]


class MakesDropoutAnew(WithBufferOfItsOwn):
    def layers(self) -> list[nn.Module]:
        return [self.first, nn.Dropout(0.5), self.last]


class Remembers(nn.Linear):
    def get_extra_state(self) -> Tensor:
        return torch.zeros(1)

    def set_extra_state(self, state: Any) -> None:
        pass


def with_extra_state() -> nn.Module:
    return nn.Sequential(Remembers(6, 8), Remembers(8, 5))


def with_hook() -> nn.Module:
    model = four()
    model.register_forward_hook(lambda *_: None)
    return model


def batch(step: int, samples: int = 13) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(samples, 6, generator=generator), torch.randint(5, (samples,), generator=generator)


def changing(step: int) -> tuple[Tensor, Tensor]:
    return batch(step, (5, 6, 5, 7, 4)[step % 5])


def few(step: int) -> tuple[Tensor, Tensor]:
    return batch(step, 3)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def case(model: Make, make_batch: Any = batch, clip: float | None = 0.1) -> Case:
    return Case(model, make_batch, loss, adamw, steps=5, clip=clip)


@pytest.mark.slow_cases("2-1")
@pytest.mark.parametrize("stages", ["2-1", "1-2"])
def test_replicas_remember_forms_of_each_rank_apart(stages: str) -> None:
    """One side had learned a form from one replica and expected it of another."""
    assert_equal(case(four, changing), f"pipeline={stages} microbatches=2")


@pytest.mark.slow_cases("1-2-file", "1-3-file", "1-3-naive")
@pytest.mark.parametrize("order", ["naive", "file"])
@pytest.mark.parametrize("stages", ["1-2", "1-3"])
def test_replicas_that_work_one_after_the_other_do_not_wait_for_sums_of_gradients(
    stages: str, order: str, tmp_path: Path
) -> None:
    """At zero=1 a backward waited for the sum of one unit's gradients before it went on to the next but one.
    The other replica, whose microbatch comes later, took no part in it: it waited for that backward to end.
    Random plans found it."""
    path = tmp_path / "mine.txt"
    path.write_text(show(flushed("naive", tuple(map(int, stages.split("-"))), 2)))
    schedule = path if order == "file" else order
    assert_equal(case(eight), f"pipeline={stages} zero=1 schedule={schedule} microbatches=2")


def test_nor_for_those_of_groups_that_shard() -> None:
    """It was so again where a second sum followed, over the copies."""
    plan = "data=2 pipeline=1-2 zero=1 shard=2 schedule=naive microbatches=2"
    assert_equal(replace(case(eight), steps=2), plan)


@pytest.mark.slow_cases("pipedream")
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_what_is_computed_again_uses_the_weights_of_its_forward(schedule: str) -> None:
    assert_equal(case(checkpointed, clip=None), f"pipeline=3 schedule={schedule} microbatches=3")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("model", "plan"),
    [(hooked, ""), (hooked, "data=2 zero=2"), (hooked_weights, ""), (hooked_weights, "data=2")],
)
def test_hooks_run_once_where_a_backward_is_cut_in_two(model: Make, plan: str) -> None:
    assert_equal(
        replace(case(model), make_optimizer=sgd), f"{plan} pipeline=2 schedule=zero-bubble microbatches=2"
    )


def test_crossed_ties_of_several_chunks_do_not_wait_for_each_other() -> None:
    assert_equal(case(Crossed), "pipeline=2 schedule=interleaved chunks=2 microbatches=2")


def test_ties_of_two_groups_in_turn() -> None:
    """The first stage summed in three messages what the last one summed in two."""
    assert_equal(case(three_ties), "pipeline=3 microbatches=2")


def test_a_tie_with_a_server_and_its_workers() -> None:
    assert_equal(case(UsedElsewhere), "pipeline=2-1 sync=parameter-server microbatches=2")


def test_the_norm_counts_a_tied_weight_that_the_counting_stage_does_not_use() -> None:
    assert_equal(case(UsedElsewhere), "data=2 pipeline=2")


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("model", [frozen_first_stage, without_weights_in_a_stage])
def test_a_stage_may_have_nothing_to_train(model: Make, zero: int) -> None:
    assert_equal(case(model), f"data=2 pipeline=4 zero={zero} microbatches=2")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("model", [in_place, in_place_later])
def test_a_stage_may_change_what_it_receives(model: Make, schedule: str) -> None:
    assert_equal(case(model), f"pipeline=2 schedule={schedule} microbatches=2")


def test_buffers_of_the_model_itself_and_of_any_type_are_kept() -> None:
    assert_equal(case(WithBufferOfItsOwn), "pipeline=2")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "plan", ["schedule=pipedream", "pipeline=2 schedule=pipedream", "pipeline=2 schedule=pipedream-2bw"]
)
def test_fewer_samples_than_microbatches_in_a_pipeline_that_never_drains(plan: str) -> None:
    """A microbatch without samples was an update over nothing, and the end of the training."""
    assert_equal(case(four, few, clip=None), f"{plan} microbatches=4")


@pytest.mark.parametrize(
    ("model", "match"),
    [(MakesDropoutAnew, "returns Dropout"), (with_extra_state, "_extra_state"), (with_hook, "forward hooks")],
)
def test_what_no_rank_would_run_is_refused(model: Make, match: str) -> None:
    with pytest.raises(UserError, match=match):
        verify(case(model), "pipeline=2")


@pytest.mark.parametrize(
    ("plan", "text", "match"),
    [
        (
            "pipeline=3 microbatches=2",
            "stage 0: 0 1\nstage 1: 2\nrank 0: F0 B0\nrank 1: F1 B1\nrank 2: F0 B0 F1 B1\n",
            "set pipeline=2-1",
        ),
        ("pipeline=2 microbatches=2", "rank 0: F0 B0\nrank 1: F0 B0\n", "set microbatches=1"),
        ("data=2 pipeline=2 zero=3", "rank 0: F0 I0 W0\nrank 1: F0 I0 W0\n", "use zero=2"),
        (
            "pipeline=2 microbatches=2",
            "rank 0: F0 B0 REDUCE F1 B1 REDUCE UPDATE\nrank 1: F0 B0 REDUCE F1 B1 REDUCE UPDATE\n",
            "one REDUCE for each stage",
        ),
    ],
)
def test_schedule_files_that_the_plan_cannot_run_are_refused(
    tmp_path: Path, plan: str, text: str, match: str
) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=match):
        verify(case(four), f"{plan} schedule={path}")
