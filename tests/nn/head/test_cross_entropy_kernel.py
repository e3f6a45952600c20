"""The kernel writes what torch's operations do."""

import pytest
import torch
import torch.nn.functional as F

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1000, 4096, 9001])
def test_losses_and_gradients_are_those_of_float32(dtype: torch.dtype, columns: int) -> None:
    from echelon.nn.head.cross_entropy_kernel import lose

    torch.manual_seed(0)
    logits = (torch.randn(33, columns, device="cuda") * 5).to(dtype)
    logits[3, : columns // 2] = -torch.inf
    targets = torch.randint(columns // 2, columns, (33,), device="cuda")
    targets[::4] = -100
    logits[4] = torch.nan  # ignored
    precise = logits.double().requires_grad_()
    logits = F.pad(logits, (0, 64), value=-torch.inf)
    expected = F.cross_entropy(precise, targets, reduction="none")
    expected[targets != -100].sum().backward()
    losses = torch.empty(33, device="cuda")
    lose(logits, columns, targets, -100, losses, with_gradient=True)
    assert bool((logits[:, columns:] == 0).all())
    logits = logits[:, :columns]
    counted = targets != -100
    torch.testing.assert_close(losses[counted].double(), expected[counted].detach(), rtol=1e-5, atol=1e-5)
    assert bool((losses[~counted] == 0).all())
    assert precise.grad is not None
    torch.testing.assert_close(logits[counted].double(), precise.grad[counted], rtol=1e-2, atol=1e-6)
    assert bool((logits[~counted] == 0).all())
