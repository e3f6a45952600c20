"""autocast around steps: weights that were cast for one microbatch or step are not those of the next."""

import pytest
import torch
from torch import nn

from echelon.engine import parallelize
from tests.cases import mean_loss, sgd, vectors


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))


def plain_weights() -> dict[str, torch.Tensor]:
    trained = model()
    optimizer = sgd(trained.parameters())
    for step in range(3):
        inputs, targets = vectors(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = mean_loss(trained(inputs), targets)
        loss.backward()
        optimizer.step()
    return trained.state_dict()


@pytest.mark.parametrize(
    ("plan", "tolerance"),
    [("data=1", 0.0), ("offload=parameters", 0.0), ("offload=parameters microbatches=2", 1e-3)],
)
def test_a_loop_inside_of_autocast_is_equal_to_a_forward_inside_of_it(plan: str, tolerance: float) -> None:
    """Its cache outlived updates, and with it weights were used while they were not gathered."""
    with (
        parallelize(model(), plan, optimizer=sgd, loss=mean_loss, smallest_unit=1) as engine,
        torch.autocast("cpu", torch.bfloat16),
    ):
        for step in range(3):
            engine.step(vectors(step))
        assert torch.is_autocast_cache_enabled()
        weights = engine.full_state_dict()
    for name, expected in plain_weights().items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=tolerance)
