"""Operations that torch lacks below float32 are named, with what to use, before a weight changes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from echelon import UserError, parallelize
from echelon.engine.missing_operation import missing_operation
from echelon.launching import Ranks
from echelon.plan import Plan
from tests.cases import mean_loss, sgd, vectors

CPU = torch.device("cpu")


class Distances(nn.Module):
    """Of rows to learned points: torch.cdist has no kernel for fp16 on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.points)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Distances())


def refusal(plan: str) -> tuple[str, bool]:
    """What a step says, and whether it left the weights."""
    trained = model()
    engine = parallelize(trained, plan, optimizer=sgd, loss=mean_loss)
    before = [p.detach().clone() for p in trained.parameters()]
    with pytest.raises(UserError) as caught:
        engine.step(engine.local(vectors(0)))
    unchanged = all(torch.equal(*pair) for pair in zip(before, trained.parameters(), strict=True))
    return str(caught.value), unchanged


SAYS = "precision=fp16: torch does not have the operation cdist for it on a CPU"


@pytest.mark.parametrize("plan", ["precision=fp16", "precision=fp16 microbatches=2"])
def test_an_operation_that_torch_lacks_is_named_and_nothing_changes(plan: str) -> None:
    said, unchanged = refusal(plan)
    assert said.startswith(SAYS)
    assert "use precision=bf16, or a GPU, or precision=fp32" in said
    assert unchanged


def test_every_rank_of_a_pipeline_says_so(warm_ranks: Callable[[int], Ranks]) -> None:
    for said, unchanged in warm_ranks(2).run(refusal, "precision=fp16 pipeline=2 microbatches=2"):
        assert said.startswith(SAYS)
        assert unchanged


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("\"cdist\" not implemented for 'Half'", "the operation cdist"),
        ("linalg.inv: Low precision dtypes not supported. Got BFloat16", "the operation linalg.inv"),
        ("Unsupported dtype Half", "an operation"),
    ],
)
def test_torch_says_it_in_three_ways(message: str, name: str) -> None:
    error = missing_operation(message, Plan(precision="bf16"), CPU)
    assert f"torch does not have {name} for it on a CPU" in str(error)
    assert "use a GPU, or precision=fp32" in str(error)
    assert missing_operation(message, Plan(precision="fp32"), CPU) is None


def test_other_errors_are_what_they_are() -> None:
    assert missing_operation("\"cdist\" not implemented for 'Long'", Plan(precision="fp16"), CPU) is None
    on_gpu = missing_operation("Unsupported dtype Half", Plan(precision="fp16"), torch.device("cuda"))
    assert "a GPU" not in str(on_gpu)
