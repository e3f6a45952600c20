"""Whatever passes between layers, of whatever shape: the contract holds."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.verify import assert_equal
from tests.cases import eleven_vectors, vectors
from tests.parallel.pipeline.models import Hidden, perceptron, vector_case

pytestmark = pytest.mark.usefixtures("warm_contract")

Structure = dict[str, Any]


def numbered(step: int) -> tuple[Structure, Tensor]:
    """Inputs that are a structure, in which every sample has a number."""
    inputs, targets = vectors(step)
    return {"x": inputs, "number": torch.arange(len(inputs)), "scale": 0.5}, targets


class Unfold(nn.Module):
    """Returns all kinds of things, some of which nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused, self.uncalled = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, given: Structure) -> Structure:
        x, number = given["x"], given["number"]
        hidden = torch.tanh(self.linear(x))
        return {
            "hidden": hidden,
            "twice": [hidden, (hidden, None)],
            "input": x,
            "number": number,
            "even": number % 2 == 0,
            "plain": (True, "sum", given["scale"], 3, None),
            "unused": self.unused(x),  # a gradient that stays None: its weights must not move
            "constant": hidden.detach() * 2,
            "turned": hidden.t(),
            "complex": torch.complex(hidden, -hidden),
            "single": number.float(),
            "empty": hidden[:0],
        }


class Mix(nn.Module):
    """Uses most of it, and passes some of it on as it came."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given: Structure) -> list[Any]:
        hidden, (again, (once_more, nothing)) = given["hidden"], given["twice"]
        flag, name, scale, power, also_nothing = given["plain"]
        assert nothing is None
        assert also_nothing is None
        assert flag is True
        assert (name, type(power)) == ("sum", int)
        assert given["empty"].shape == (0, 6)
        mixed = hidden + again * scale + once_more**power + given["input"] * given["even"].unsqueeze(1)
        mixed = mixed + given["constant"] + given["turned"].t() + given["complex"].imag
        mixed = mixed + 0.1 * given["number"].unsqueeze(1) + given["single"].double().unsqueeze(1)
        return [torch.tanh(self.linear(mixed)), (hidden, given["number"]), given["unused"]]


class Finish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, given: list[Any]) -> Tensor:
        mixed, (hidden, number), _ = given
        output: Tensor = self.linear(mixed + hidden) * (1 + 0.01 * number.unsqueeze(1))
        return output


def of_everything() -> nn.Module:
    return nn.Sequential(Unfold(), Mix(), Finish())


@pytest.mark.slow_cases("schedule=1f1b microbatches=2 data=2 zero=2", "schedule=zero-bubble microbatches=5")
@pytest.mark.parametrize(
    "plan",
    [
        "schedule=1f1b microbatches=3",
        "schedule=zero-bubble microbatches=5",
        "schedule=1f1b microbatches=2 data=2 zero=2",
    ],
)
def test_structures_of_everything(plan: str) -> None:
    case = vector_case(of_everything, make_batch=numbered)
    names = assert_equal(case, f"pipeline=3 {plan}").tensors
    assert "0.unused.weight" in names
    assert "0.unused.weight exp_avg" not in names  # as on one device: nothing used it
    assert "1.linear.weight exp_avg" in names


def test_structures_of_everything_with_versions() -> None:
    case = vector_case(of_everything, make_batch=numbered, clip=None)
    assert_equal(case, "pipeline=3 schedule=pipedream microbatches=3")


def test_structures_go_to_replicas_that_take_turns() -> None:
    assert_equal(vector_case(of_everything, make_batch=numbered), "pipeline=1-2-1 microbatches=3")


# Shapes that change.


def of_many_sizes(step: int) -> tuple[Tensor, Tensor]:
    """Sizes for which all microbatches, some, or other ones than before, have one sample more."""
    return vectors(step, samples=(13, 15, 10, 16, 3, 13)[step])


@pytest.mark.slow_cases("1-3")
@pytest.mark.parametrize("pipeline", ["2", "1-3"])
def test_batches_of_other_sizes(pipeline: str) -> None:
    case = vector_case(perceptron, make_batch=of_many_sizes, steps=6)
    assert_equal(case, f"pipeline={pipeline} microbatches=4")


class Choose(nn.Module):
    """Lets through the samples whose first feature is positive: how many depends on the values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.linear(x))
        chosen = x[:, 0] > 0
        return x[chosen], chosen


class Return(nn.Module):
    """Works on the chosen ones, and puts them back into their places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        x, chosen = given
        return x.new_zeros(len(chosen), 6).index_put((chosen,), torch.tanh(self.linear(x)))


def choosing() -> nn.Module:
    return nn.Sequential(Hidden(), Choose(), Return(), nn.Linear(6, 5))  # cut in the middle


@pytest.mark.slow_cases(
    "pipeline=2 chunks=2 schedule=interleaved microbatches=4 data=2",
    "pipeline=2 microbatches=6 schedule=gpipe",
    "pipeline=2-1 microbatches=6",
)
@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=2 microbatches=6",
        "pipeline=2 microbatches=6 schedule=gpipe",
        "pipeline=2-1 microbatches=6",
        "pipeline=2 chunks=2 schedule=interleaved microbatches=4 data=2",
    ],
)
def test_shapes_that_depend_on_values(plan: str) -> None:
    """Regression: what followed a message of unexpected form was taken by the receive posted behind it."""
    assert_equal(vector_case(choosing, steps=6), plan)


def test_shapes_that_depend_on_values_with_versions() -> None:
    assert_equal(vector_case(choosing, clip=None, steps=6), "pipeline=2 schedule=pipedream microbatches=3")


def three_vectors(step: int) -> tuple[Tensor, Tensor]:
    return vectors(step, samples=3)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream-2bw"])
def test_fewer_samples_than_microbatches(schedule: str) -> None:
    case = vector_case(perceptron, make_batch=three_vectors, clip=None)
    assert_equal(case, f"pipeline=2 schedule={schedule} microbatches=7")


def test_a_smaller_last_microbatch() -> None:
    assert_equal(vector_case(perceptron, make_batch=eleven_vectors), "pipeline=3 microbatches=4")
