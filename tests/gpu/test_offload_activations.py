"""offload=activations over a real boundary: copy streams and pinned memory."""

import threading
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.collectives import Ledger
from echelon.collectives.boundary import FETCH, STORE, make_boundary
from echelon.memory.activation_offload.offload import ActivationOffload
from echelon.memory.activation_offload.offloaded_storage import HostPool
from echelon.models import ModelConfig, build, cross_entropy
from tests.gpu.test_no_sync import waiting_raises

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = ModelConfig("gpt", 4, 256, 4, vocab=512, sequence=128, dropout=0.1)


def gpt() -> nn.Module:
    return build(CONFIG)


class Recurrent(nn.Module):
    """Its kernels save memory of their own, which no other operation sees."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(128, 128, 2, batch_first=True), nn.GRU(128, 128, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        between, _ = self.lstm(x)
        result, _ = self.gru(between)
        return x + result


def recurrent() -> nn.Module:
    return nn.Sequential(nn.Embedding(512, 128), *(Recurrent() for _ in range(3)), nn.Linear(128, 512))


def tokens(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randint(512, (8, 129), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)  # type: ignore[arg-type]


def trained(
    make: Callable[[], nn.Module], plan: str, steps: int = 3
) -> tuple[list[float], list[Tensor], int]:
    torch.manual_seed(0)
    model = make().cuda()
    with echelon.parallelize(model, plan, optimizer=adamw, loss=cross_entropy) as engine:
        losses = [engine.step(tokens(step)).loss for step in range(steps)]
        state = engine.full_state_dict()
        moved = engine.ledger.total("host", STORE, "activations").sent
        assert moved == engine.ledger.total("host", FETCH, "activations").received
        return losses, [state[name].cpu() for name in sorted(state)], moved


@cache
def trained_on_the_device(make: Callable[[], nn.Module], plan: str) -> tuple[list[float], list[Tensor]]:
    losses, weights, _ = trained(make, plan)
    return losses, weights


PLANS = [
    "precision=fp32",
    "precision=bf16 microbatches=2 schedule=gpipe",
    "precision=bf16 recompute=full",
    "precision=bf16 recompute=selective",
    "precision=fp32 recompute=full contiguous=true",
    "precision=bf16 compile=true",
]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch 2.11, in its own compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # a look of the compiler's
@pytest.mark.parametrize("plan", PLANS)
def test_training_is_that_of_the_device_alone(plan: str) -> None:
    """The same kernels on the same numbers: small differences are those of kernels that add in any order."""
    expected, weights = trained_on_the_device(gpt, plan)
    found, others, moved = trained(gpt, f"{plan} offload=activations")
    assert moved > 0
    assert found == pytest.approx(expected, rel=1e-3)
    for one, other in zip(weights, others, strict=True):
        assert torch.allclose(one.float(), other.float(), atol=2e-3)


def test_recurrent_kernels() -> None:
    expected, weights = trained_on_the_device(recurrent, "precision=fp32")
    found, others, moved = trained(recurrent, "precision=fp32 offload=activations")
    assert moved > 0
    assert found == pytest.approx(expected, rel=1e-4)
    for one, other in zip(weights, others, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("make", [gpt, recurrent])
@pytest.mark.filterwarnings("ignore")  # of kernels that may add in any order
def test_the_same_to_the_last_bit(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels that add in one order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    plan = "precision=fp32 microbatches=2"
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        expected, weights, _ = trained(make, plan)
        found, others, moved = trained(make, f"{plan} offload=activations")
    finally:
        torch.use_deterministic_algorithms(False)
    assert moved > 0
    assert found == expected
    assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))


@pytest.mark.parametrize("make", [gpt, recurrent])
def test_a_step_under_another_stream(make: Callable[[], nn.Module]) -> None:
    expected, weights = trained_on_the_device(make, "precision=fp32")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found, others, moved = trained(make, "precision=fp32 offload=activations")
    torch.cuda.current_stream().wait_stream(stream)
    assert moved > 0
    assert found == pytest.approx(expected, rel=1e-3)
    for one, other in zip(weights, others, strict=True):
        assert torch.allclose(one, other, atol=2e-3)


def test_memory_is_let_go_in_the_order_of_the_step() -> None:
    """The copies are long, and who frees what autograd saved is another thread under another stream."""
    device = torch.device("cuda", torch.cuda.current_device())
    ledger, step = Ledger(), torch.cuda.Stream()
    boundary = make_boundary(device, ledger)
    offload = ActivationOffload(boundary, ledger, device, HostPool(boundary, lambda: None))
    size = 64 << 20
    for _ in range(3):
        with torch.cuda.stream(step):
            x = torch.ones(size, device=device, requires_grad=True)
            with offload.passing((0, 0), [x]):
                held = [(x * 2).square()]
            offload.store((0, 0))
            offload.release_stored()
            offload.fetch((0, 0))
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        with torch.cuda.stream(step):  # one of them in the memory of the fetch, which must be over
            zeros = [torch.zeros(size, device=device) for _ in range(3)]
            torch.cuda.synchronize()
            assert not any(bool(each.any()) for each in zeros)
        del x, zeros
    boundary.close()


def peak(plan: str, layers: int) -> int:
    torch.manual_seed(0)
    config = ModelConfig("gpt", layers, 256, 4, vocab=512, sequence=128)
    with echelon.parallelize(
        build(config).cuda(), plan, optimizer=adamw, loss=cross_entropy, audit="off"
    ) as engine:
        for step in range(3):
            engine.step(tokens(step))
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.step(tokens(3))
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def test_memory_of_the_device_does_not_grow_with_layers() -> None:
    """Beside gradients, which both hold before the step begins: SGD's state and they are resting memory."""
    few, many = peak("offload=activations", 4), peak("offload=activations", 16)
    grows = peak("", 16) - peak("", 4)
    assert many - few < 0.35 * grows


def test_a_step_waits_for_nothing() -> None:
    """The host queues a step without a look at the device."""
    torch.manual_seed(0)
    with echelon.parallelize(
        gpt().cuda(), "precision=bf16 offload=activations", optimizer=adamw, loss=cross_entropy
    ) as engine:
        for step in range(4):
            engine.step(tokens(step))
        torch.cuda.synchronize()
        with waiting_raises():
            engine.step(tokens(5))
