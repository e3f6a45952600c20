"""The reference is plain training: by hand in float64, and by hand with float32 masters."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.verify import Case
from echelon.verify.reference import ReferenceModel, mean, train_on_one_device
from tests.cases import counted_loss, masked_vectors, perceptron_case

BF16 = torch.bfloat16


class Scale(nn.Module):
    """One weight, one that is frozen, one that nothing uses, and a second name of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0]))
        self.tied = self.weight
        self.frozen = nn.Parameter(torch.tensor([3.0]), requires_grad=False)
        self.unused = nn.Parameter(torch.tensor([5.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def batch(step: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([[1.0], [3.0]]), torch.tensor([step, step])


def product(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()  # whose gradient is 2, the mean of the inputs


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=2.0**-10, momentum=0.5)


CASE = Case(Scale, batch, product, momentum, steps=3, clip=None)


def test_three_steps_in_float64_are_those_written_by_hand() -> None:
    result = train_on_one_device(CASE)
    # The buffer is 2, then 2 + 0.5·2 = 3, then 2 + 0.5·3 = 3.5: the weight falls by their sum times the rate.
    assert result.weights["weight"].item() == 1.0 - 8.5 * 2.0**-10
    assert torch.equal(result.weights["tied"], result.weights["weight"])
    assert result.optimizer["weight"]["momentum_buffer"].item() == 3.5
    assert result.optimizer.keys() == {"weight", "tied", "frozen", "unused"}
    assert result.optimizer["frozen"] == result.optimizer["unused"] == {}
    assert result.losses == [2 * weight for weight in (1.0, 1 - 2 * 2.0**-10, 1 - 5 * 2.0**-10)]
    assert result.masters == {}
    assert result.grad_norms == [2.0, 2.0, 2.0]
    assert result.evaluation == 2 * result.weights["weight"].item()


def test_masters_keep_updates_that_the_weights_are_too_coarse_for() -> None:
    """Below 1, bf16 counts in steps of 2⁻⁸: one update of 2⁻⁹ is rounded away, and three are not."""
    result = train_on_one_device(CASE, BF16)
    master = 1.0 - 8.5 * 2.0**-10
    assert result.weights["weight"].dtype == BF16
    assert result.weights["weight"].item() == torch.tensor(master).to(BF16).item() == 1 - 2 * 2.0**-8
    assert result.optimizer["weight"]["momentum_buffer"].dtype == torch.float32
    assert result.optimizer["weight"]["momentum_buffer"].item() == 3.5
    assert {name: value.item() for name, value in result.masters.items()} == {"weight": master, "unused": 5.0}
    assert result.losses[:2] == [2.0, 2.0]


def test_clipping_is_by_the_global_norm_of_what_the_optimizer_gets() -> None:
    for dtype in (torch.float64, BF16):
        reference = ReferenceModel(Case(Scale, batch, product, momentum, clip=1.0), dtype)
        mean(reference.loss(batch(0), 0)).backward()
        assert reference.update(reference.pop_gradients(), 0) == 2.0
        update = reference.optimizer.state[reference.masters[0]]["momentum_buffer"]
        assert update.item() == pytest.approx(1.0, rel=1e-5)


def test_gradients_are_popped_in_the_type_of_the_masters() -> None:
    reference = ReferenceModel(CASE, BF16)
    mean(reference.loss(batch(0), 0)).backward()
    used, unused = reference.pop_gradients()
    assert used is not None
    assert (used.dtype, used.item(), unused) == (torch.float32, 2.0, None)
    assert all(parameter.grad is None for parameter in reference.parameters)


def test_versions_are_copies() -> None:
    reference = ReferenceModel(CASE)
    version = reference.copy()
    reference.update([torch.ones(1, dtype=torch.float64), None], 0)
    assert version[0].item() == 1.0
    assert reference.parameters[0].item() != 1.0
    reference.load(version)
    assert reference.parameters[0].item() == 1.0


def test_a_counted_loss_is_averaged_over_what_it_counts() -> None:
    assert mean((torch.tensor(6.0), torch.tensor(4))).item() == 1.5
    assert mean(torch.tensor(6.0)).item() == 6.0
    result = train_on_one_device(perceptron_case(masked_vectors, counted_loss, steps=1))
    inputs, targets = masked_vectors(0)
    model = perceptron_case().build()
    kept = targets != -100
    expected = nn.functional.cross_entropy(model(inputs.double())[kept], targets[kept])
    assert result.losses[0] == pytest.approx(expected.item(), abs=1e-12)


class OwnLoss(nn.Module):
    """Takes arguments by name, and returns its own loss if it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, values: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        output = self.weight * values
        loss = None if labels is None else (output - labels).float().square().mean()
        return SimpleNamespace(output=output, loss=loss)


def named_batch(step: int) -> dict[str, Tensor]:
    return {"values": torch.full((2,), step + 1.0), "labels": torch.full((2,), 1e-9)}


def absolute(output: SimpleNamespace, labels: Tensor) -> Tensor:
    assert output.loss is None, "a model gets no labels for a loss that is given"
    loss: Tensor = (output.output - labels).abs().mean()
    return loss


def quarter_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.25)


def test_a_dict_is_arguments_and_a_schedule_sets_rates() -> None:
    case = Case(
        *(OwnLoss, named_batch, absolute, quarter_sgd),
        steps=2,
        clip=None,
        options={"schedule": lambda step: 1 - step / 2},
    )
    result = train_on_one_device(case)
    assert result.weights["weight"].item() == 1 - 0.25 * 1 - 0.125 * 2
    assert result.losses == pytest.approx([1 - 1e-9, 1.5 - 1e-9], abs=1e-15)


def test_a_loss_of_the_model_itself_is_computed_in_float64() -> None:
    result = train_on_one_device(Case(OwnLoss, named_batch, None, quarter_sgd, steps=1))
    assert result.losses == pytest.approx([(1 - 1e-9) ** 2], abs=1e-15), "in float32 it would be 1"
