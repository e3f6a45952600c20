"""Kernels of gates, run in numpy."""

import numpy as np
import pytest
import torch

import echelon.nn.experts
from echelon.nn.experts.routing import top_softmax
from tests.nn.dropout.triton_stand_in import kernel_on_cpu


@pytest.mark.parametrize(("shape", "count"), [((1, 1), 1), ((9, 5), 2), ((300, 64), 6), ((3, 1000), 16)])
def test_the_largest_scores_are_those_of_a_stable_sort(shape: tuple[int, int], count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-3, 4, shape, generator=generator) * torch.rand((), generator=generator)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40])
    place = torch.randint(40, shape, generator=generator)
    scores = torch.where(place < len(special), special[place.clamp(max=len(special) - 1)], scores)
    with kernel_on_cpu(echelon.nn.experts, "gate_kernels") as kernels:
        indices = kernels.largest(scores, count)
    assert torch.equal(indices, scores.sort(dim=-1, descending=True, stable=True).indices[:, :count])


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 1, 1), (70, 5, 2), (300, 64, 6)])
def test_slots_are_counted_and_entropies_added_up(tokens: int, experts: int, k: int) -> None:
    logits = 5 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0))
    logits[:, 0] -= 200  # a probability of 0
    probabilities = logits.softmax(-1)
    indices = logits.topk(k).indices
    indices[0, 0] = experts  # dropped
    with kernel_on_cpu(echelon.nn.experts, "gate_kernels") as kernels:
        counts, entropy = kernels.statistics(indices, probabilities, logits)
    assert torch.equal(counts, indices.flatten().bincount(minlength=experts + 1)[:experts].float())
    torch.testing.assert_close(entropy, torch.special.entr(probabilities).sum(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_the_entropy_of_a_logit_that_is_no_number_is_none(wrong: float) -> None:
    logits = torch.randn(70, 5, generator=torch.Generator().manual_seed(0))
    logits[40, 2] = wrong
    with kernel_on_cpu(echelon.nn.experts, "gate_kernels") as kernels, np.errstate(invalid="ignore"):
        _, entropy = kernels.statistics(logits.topk(2).indices, logits.softmax(-1), logits)
    assert entropy[2].isnan()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 2, 1), (70, 5, 3), (300, 64, 6)])
def test_the_choice_by_a_softmax_and_its_gradient(tokens: int, experts: int, k: int, normalize: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(tokens, experts, generator=generator)).requires_grad_()
    expected = top_softmax(logits, k, normalize=normalize)
    gradients = [torch.randn(each.shape, generator=generator) for each in (expected[0], expected[2])]
    with kernel_on_cpu(echelon.nn.experts, "gate_kernels") as kernels:
        found = kernels.top_softmax(logits.detach(), k, normalize)
        assert torch.equal(found[1], expected[1])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-5, atol=1e-7)
        for given in (gradients, [None, gradients[1]], [gradients[0], None]):
            outputs = [each for each, of in zip(expected[::2], given, strict=True) if of is not None]
            kept = [each for each in given if each is not None]
            (gradient,) = torch.autograd.grad(outputs, logits, kept, retain_graph=True)
            computed = kernels.top_softmax_gradient(*given, *found, normalize)
            torch.testing.assert_close(computed, gradient, rtol=1e-4, atol=1e-6)


def test_a_row_with_a_logit_that_is_no_number_has_none_and_chooses_experts_that_exist() -> None:
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    logits[1, 2] = torch.nan
    with kernel_on_cpu(echelon.nn.experts, "gate_kernels") as kernels, np.errstate(invalid="ignore"):
        probabilities, indices, weights = kernels.top_softmax(logits, 2, True)
    assert (probabilities.isnan().sum(1).tolist(), weights.isnan().sum(1).tolist()) == ([0, 5, 0], [0, 2, 0])
    assert indices[1].tolist() == [0, 1]
