"""Batch norm over ranks that are threads, against one device with all samples. Plans: test_batch_norm.py."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import Group, RecordingGroup
from echelon.errors import UserError
from echelon.nn.wrapping import Wrapping, find_wrapper
from echelon.parallel.data.batch_norm import WholeBatchNorm, synchronize_batch_norm, talks_in_forward
from tests.thread_ranks import ThreadGroup, run_threads

SHARES = (1, 4, 2)  # samples of each rank


def batch(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(sum(SHARES), *shape, generator=generator, dtype=torch.float64) * 3 + 5


def results(norm: nn.Module, x: Tensor, own: slice, weights: Tensor) -> list[Tensor]:
    """Outputs, gradients of inputs and parameters, and a gradient of gradients."""
    given = x.clone().requires_grad_()
    output = norm(given)
    loss = (output * weights).sin().sum()
    parameters = list(norm.parameters())
    gradient, *first = torch.autograd.grad(loss, [given, *parameters], create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), given)
    return [output[own], gradient[own], second[own], *first]


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}]
)
@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.BatchNorm1d, (3,)), (nn.BatchNorm1d, (3, 2)), (nn.BatchNorm2d, (3, 2, 2))]
)
def test_ranks_with_different_numbers_of_samples_are_one_device(
    kind: type[nn.BatchNorm1d], shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    def make() -> nn.Module:
        norm = kind(3, **options).double()
        for number, parameter in enumerate(norm.parameters()):
            parameter.data += torch.arange(3) + number
        return norm

    x, weights = batch(shape), torch.arange(3.0, dtype=torch.float64).view(3, *[1] * (len(shape) - 1)) + 1
    reference = make()
    expected = results(reference, x, slice(None), weights)
    buffers = [buffer.clone() for buffer in reference.buffers()]

    def run(group: Group) -> list[Tensor]:
        assert isinstance(group, ThreadGroup)
        norm, begin = make(), sum(SHARES[: group.rank])
        own = slice(begin, begin + SHARES[group.rank])
        forward = WholeBatchNorm(norm, group, 1)  # type: ignore[arg-type]
        with Wrapping() as wrapping:
            wrapping.wrap(forward)
            found = results(norm, x[own], slice(None), weights)
        for one, other in zip(found[:3], expected[:3], strict=True):
            torch.testing.assert_close(one, other[own], rtol=1e-9, atol=1e-9)
        for one, other in zip(norm.buffers(), buffers, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert set(group.subjects) == {"batch norm"}
        return found[3:]

    sums = [torch.stack(list(each)).sum(0) for each in zip(*run_threads(len(SHARES), run), strict=True)]
    for one, other in zip(sums, expected[3:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_low_precision_is_summed_in_float32_and_returned_as_it_came() -> None:
    def run(group: Group) -> None:
        norm = nn.BatchNorm1d(2).to(torch.bfloat16)
        x = torch.ones(300, 2, dtype=torch.bfloat16) * (1 + group.rank)
        output = WholeBatchNorm(norm, group, 1)(x)
        assert output.dtype == torch.bfloat16
        assert torch.allclose(output.float(), torch.full((300, 2), 2.0 * group.rank - 1), atol=1e-2)
        torch.testing.assert_close(norm.running_mean.float(), torch.full((2,), 0.15), atol=1e-2, rtol=0)

    run_threads(2, run)


def test_in_eval_the_running_statistics_are_used_and_nobody_talks() -> None:
    group = RecordingGroup("data", 0, 2)
    norm = nn.BatchNorm1d(2).eval()
    x = torch.randn(3, 2)
    assert torch.equal(WholeBatchNorm(norm, group, 2)(x), norm(x))
    assert not group.ledger.moves
    without = nn.BatchNorm1d(2, track_running_stats=False).eval()
    with pytest.raises(UserError, match="BatchNorm1d takes its statistics over the whole batch"):
        WholeBatchNorm(without, group, 2)(x)


def test_every_batch_norm_of_several_replicas_or_parts_is_wrapped_once() -> None:
    norm = nn.BatchNorm1d(2)
    model = nn.Sequential(norm, nn.Linear(2, 2), nn.Sequential(norm, nn.LayerNorm(2), nn.SyncBatchNorm(2)))

    def wrapped(size: int, parts: int = 1) -> tuple[list[bool], bool]:
        with Wrapping() as wrapping:
            synchronize_batch_norm([model], RecordingGroup("data", 0, size), wrapping, parts=parts)
            found = [find_wrapper(each, WholeBatchNorm) is not None for each in model.modules()]
            return found, talks_in_forward(model)

    all_norms = [False, True, False, False, False, True]
    assert wrapped(1) == ([False] * 6, False)
    assert wrapped(2) == (all_norms, True)
    assert wrapped(1, 2) == (all_norms, False), "a single replica has nobody to talk to"
    with Wrapping() as wrapping:
        synchronize_batch_norm([model], RecordingGroup("data", 0, 1), wrapping)
        assert find_wrapper(norm, WholeBatchNorm) is None
