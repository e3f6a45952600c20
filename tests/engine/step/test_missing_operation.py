"""Operations that torch lacks below float32 are named, with what to use, before a weight changes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from echelon import UserError, parallelize
from echelon.engine.step.missing_operation import missing_operation
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
    with engine._watch.own_work():
        before = [p.detach().clone() for p in trained.parameters()]
    with pytest.raises(UserError) as caught:
        engine.step(engine.local(vectors(0)))
    with engine._watch.own_work():
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


class InnerGradient(nn.Module):
    """A step of descent in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        def energy(values: Tensor) -> Tensor:
            return torch.tanh(self.energy(values)).square().sum()

        return self.head(x - 0.1 * torch.func.grad(energy)(x))


class Float32Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.head = torch.ones(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ self.matrix)


def weights_after(make: Callable[[], nn.Module], plan: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    trained = make().double()
    if not plan:
        optimizer = sgd(trained.parameters())
        for step in range(2):
            optimizer.zero_grad()
            inputs, targets = vectors(step)
            mean_loss(trained(inputs.double()), targets).backward()
            optimizer.step()
        return trained.state_dict()
    with parallelize(trained, plan, optimizer=sgd, loss=mean_loss, smallest_unit=1, audit="off") as engine:
        for step in range(2):
            inputs, targets = vectors(step)
            engine.step((inputs.double(), targets))
        return engine.full_state_dict()


def test_torch_func_in_a_forward_trains_while_memory_is_counted() -> None:
    """The meter's hooks only look on: torch.func does not run inside of hooks."""
    expected = weights_after(InnerGradient, "")
    for name, value in weights_after(InnerGradient, "precision=fp64").items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:module forward hook with")  # fails too, says torch
@pytest.mark.parametrize("plan", ["compress=gist", "offload=parameters", "offload=optimizer"])
def test_torch_func_in_a_forward_is_refused_where_a_plan_is_in_its_way(plan: str) -> None:
    with pytest.raises(UserError, match=rf"calls torch.func .*: drop {plan}, or use torch.autograd.grad"):
        weights_after(InnerGradient, f"{plan} precision=fp64")


def test_a_float32_part_under_fp64_is_named() -> None:
    with pytest.raises(UserError, match=r"precision=fp64: .* given two types .*in buffers"):
        weights_after(Float32Constant, "precision=fp64")


@pytest.mark.parametrize(
    "message",
    [
        "expected m1 and m2 to have the same dtype, but got: double != float",
        "mat1 and mat2 must have the same dtype, but got Float and Double",
        "mixed dtype (CPU): expect parameter to have scalar type of Float",
        "expected scalar type Double but found Float",
        "Input type (double) and bias type (float) should be the same",
    ],
)
def test_torch_says_that_types_differ_in_many_ways(message: str) -> None:
    error = missing_operation(message, Plan(precision="fp64"), CPU)
    assert "precision=fp64: an operation of the model is given two types" in str(error)
    assert missing_operation(message, Plan(precision="fp32"), CPU) is None
    assert missing_operation("sizes should be the same", Plan(precision="fp64"), CPU) is None
    low = missing_operation("expected scalar type Float but found BFloat16", Plan(precision="bf16"), CPU)
    assert "precision=bf16: an operation of the model is given two types" in str(low)


@pytest.mark.parametrize(
    "message",
    [
        "shape '[2, 8, 2, 16]' is invalid for input of size 256",
        "split_with_sizes expects split_sizes to sum exactly to 48 (input tensor's size at dimension 2)",
        "The size of tensor a (16) must match the size of tensor b (32) at non-singleton dimension 2",
    ],
)
def test_a_forward_with_whole_widths_under_tensor_is_told_where_to_look(message: str) -> None:
    error = missing_operation(message, Plan(tensor=2), CPU)
    assert message in str(error)
    assert "has 1/2 of the features" in str(error)
    assert missing_operation(message, Plan(data=2), CPU) is None


@pytest.mark.parametrize(
    "message",
    [
        "one of the variables needed for gradient computation has been modified by an inplace operation",
        "a tensor of shape (2,) that the backward pass needs was changed in place after the forward pass had "
        "saved it; replace the in-place operation",
    ],
)
def test_a_freed_weight_is_not_taken_for_an_operation_in_place(message: str) -> None:
    error = missing_operation(message, Plan(data=2, zero=3), CPU)
    assert "a weight that zero=3 has freed" in str(error)
    assert "use zero=2" in str(error)
    assert missing_operation(message, Plan(data=2, zero=2), CPU) is None
