"""Batch norm takes the statistics of the whole batch, however many replicas share it.

Each replica once normalised with its own: ResNet under data=2 was another training than on one device.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.errors import UserError
from echelon.verify import Case, assert_equal
from tests.cases import adamw, eleven_vectors, mean_loss, vectors


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())  # type: ignore[no-any-return]


def images(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = vectors(step)
    return inputs[:, None, :, None].expand(-1, 2, -1, 3) * torch.arange(1.0, 4.0), targets


def convolution() -> nn.Module:
    """Several positions for each sample; no weights, no running statistics, a cumulative average."""
    return nn.Sequential(
        nn.Conv2d(2, 4, (3, 2)),
        nn.BatchNorm2d(4, affine=False),
        nn.Tanh(),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.Flatten(),
        nn.Linear(4 * 4 * 2, 5),
        nn.BatchNorm1d(5, momentum=None),
    )


class WithActivation(nn.BatchNorm1d):
    """Its forward does more than to normalise, as timm's BatchNormAct2d does."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def activated() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), WithActivation(8), nn.Linear(8, 8), nn.SyncBatchNorm(8), nn.Linear(8, 5)
    )


def stages() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5))


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases("activated-vectors-data=2")
@pytest.mark.parametrize(
    ("model", "batch", "plan"),
    [
        (Normalised, eleven_vectors, "data=2"),  # replicas with different numbers of samples
        (Normalised, vectors, "data=3 zero=3"),
        (convolution, images, "data=2 zero=1"),
        (activated, vectors, "data=2"),
        (stages, vectors, "pipeline=2 data=2"),
        pytest.param(Normalised, vectors, "data=2 zero=2", marks=pytest.mark.slow),
        pytest.param(convolution, images, "data=4", marks=pytest.mark.slow),
        pytest.param(stages, vectors, "pipeline=2 data=2 zero=3", marks=pytest.mark.slow),
        pytest.param(Normalised, vectors, "data=2 sync=parameter-server", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("warm_contract")
def test_replicas_normalise_as_one_device(model: Any, batch: Any, plan: str) -> None:
    assert_equal(Case(model, batch, mean_loss, adamw), plan)


def test_statistics_are_those_of_torch() -> None:
    """Also with one replica, where the wrapping alone is at work: outputs, gradients, running statistics."""
    from echelon.collectives import RecordingGroup
    from echelon.parallel.data.batch_norm import WholeBatchNorm

    torch.manual_seed(0)
    for kind, shape in (
        (nn.BatchNorm1d, (5, 3)),
        (nn.BatchNorm1d, (5, 3, 4)),
        (nn.BatchNorm2d, (2, 3, 4, 4)),
    ):
        ours, theirs = kind(3).double(), kind(3).double()
        x = torch.randn(*shape, dtype=torch.float64)
        results = []
        for norm in (ours, theirs):
            given = x.clone().requires_grad_()
            forward = WholeBatchNorm(norm, RecordingGroup("data", 0, 1), 1) if norm is ours else norm
            forward(given).sin().sum().backward()
            results.append([given.grad, norm.weight.grad, norm.bias.grad, *norm.buffers()])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_part_of_the_batch_is_refused() -> None:
    engine = echelon.parallelize(Normalised(), "microbatches=2", optimizer=adamw, loss=mean_loss)
    before = engine.full_state_dict()
    with pytest.raises(UserError, match="BatchNorm1d takes its statistics over the whole batch"):
        engine.step(vectors(0))
    assert all(torch.equal(before[name], value) for name, value in engine.full_state_dict().items())


def test_fixed_statistics_may_be_used_on_parts() -> None:
    model = Normalised()
    model.norm.eval()
    engine = echelon.parallelize(model, "microbatches=2", optimizer=adamw, loss=mean_loss)
    engine.step(vectors(0))


def test_ranks_that_share_a_replica_s_samples_are_refused_too() -> None:
    with pytest.raises(UserError, match="BatchNorm1d takes its statistics over the whole batch"):
        assert_equal(Case(stages, vectors, mean_loss, adamw), "pipeline=2-1 microbatches=1")
