from types import SimpleNamespace

import pytest
import torch

from echelon.errors import UserError
from echelon.models import cross_entropy

LOGITS = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([[1, 2, -100, 0, 6], [3, -100, -100, 5, 4]])


def test_total_and_count_leave_ignored_targets_out():
    total, count = cross_entropy(LOGITS, TARGETS)
    kept = TARGETS != -100
    chosen = LOGITS.log_softmax(-1)[kept].gather(1, TARGETS[kept][:, None])
    torch.testing.assert_close(total, -chosen.sum(), rtol=1e-14, atol=0)
    assert total.dtype == torch.float64
    assert count.item() == 7
    assert not count.is_floating_point()


def test_totals_and_counts_of_parts_add_up():
    parts = [cross_entropy(LOGITS[i : i + 1], TARGETS[i : i + 1]) for i in range(2)]
    total, count = cross_entropy(LOGITS, TARGETS)
    torch.testing.assert_close(parts[0][0] + parts[1][0], total, rtol=1e-14, atol=0)
    assert parts[0][1] + parts[1][1] == count
    assert parts[0][1] != parts[1][1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_types_are_summed_in_float32(dtype):
    low = LOGITS.to(dtype).requires_grad_()
    total, _ = cross_entropy(low, TARGETS)
    assert total.dtype == torch.float32
    exact, _ = cross_entropy(low.detach().double(), TARGETS)
    torch.testing.assert_close(total.detach().double(), exact, rtol=1e-6, atol=0)
    total.backward()
    assert low.grad.dtype == dtype


def test_nothing_counted_is_zero_and_has_zero_gradient():
    logits = LOGITS.clone().requires_grad_()
    total, count = cross_entropy(logits, torch.full_like(TARGETS, -100))
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0)
    assert not logits.grad.any()


def test_bad_input_lists_all_errors():
    with pytest.raises(UserError) as caught:
        cross_entropy(LOGITS, TARGETS[:, :-1].int())
    assert "logits are [2, 5, 7], targets [2, 4]" in caught.value.errors[0]
    assert "targets.long()" in caught.value.errors[1]


def test_what_has_logits_is_taken_as_it_is():
    output = SimpleNamespace(logits=LOGITS, loss=None)
    assert cross_entropy(output, TARGETS) == cross_entropy(LOGITS, TARGETS)
    with pytest.raises(UserError, match="targets must have the shape"):
        cross_entropy(output, TARGETS[:1])
