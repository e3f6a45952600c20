"""What a forward pass saves comes back as it was, whoever shares, changes or never asks for it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives.boundary import Copy, HostBoundary, HostMemoryError
from echelon.memory.activation_offload.offloaded_storage import OffloadedStorage, StepStream
from tests.memory.activation_offload.chains import Chain, Function, gradients

WIDTH, ROWS = 32, 16
ONE = WIDTH * ROWS * 4  # bytes of a hidden state


def hidden() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, WIDTH)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def check(*layers: nn.Module) -> Chain:
    """Gradients are those of plain torch, to the last bit, and nothing is left."""
    expected = gradients(layers, hidden())
    chain = Chain(*layers)
    x = hidden().requires_grad_()
    y = chain.forward(x).square().sum()
    chain.fetch()
    wanted = [x, *(p for layer in layers for p in layer.parameters())]
    found = torch.autograd.grad(y, wanted)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    del y
    assert chain.is_idle
    return chain


def test_gradients_are_the_same_to_the_last_bit() -> None:
    chain = check(nn.Sequential(linear(), nn.Tanh()), nn.Sequential(linear(), nn.GELU(), linear()))
    assert chain.bytes_out() == chain.bytes_in() > 0


def test_a_storage_that_two_layers_save_moves_once() -> None:
    """The result of a tanh, which is also the input of the next layer. The last result is square's too."""
    layers = [nn.Sequential(linear(), nn.Tanh()) for _ in range(4)]
    chain = check(*layers)
    assert chain.bytes_out() == 4 * ONE
    assert chain.bytes_in() == 4 * ONE


def test_views_come_back_as_they_were() -> None:
    def parts(x: Tensor) -> Tensor:
        a, b = (x * 1.5).unsafe_chunk(2, dim=1)
        c, d = (x * 0.5).split(WIDTH // 2, dim=1)
        turned = (x.t() * 2)[1:, ::2]
        return torch.cat([a * b, c * d], 1) * turned.sigmoid().sum()

    check(Function(parts), linear(), Function(parts))


def test_numbers_of_other_types_come_back() -> None:
    def mixed(x: Tensor) -> Tensor:
        order = x.detach().argsort(1)
        return (x.double().cos().float() * x.bfloat16().sin().float()).gather(1, order)

    check(Function(mixed), Function(mixed))


def test_a_change_through_data_is_seen_as_torch_sees_it() -> None:
    def changing(x: Tensor) -> Tensor:
        h = x * 2
        y = h * h
        h.data.mul_(3)
        return y

    check(Function(changing), linear())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2)
        self.gru = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        between, _ = self.lstm(x[:, None])
        result, _ = self.gru(between)
        return result[:, 0]


def test_recurrent_layers() -> None:
    check(Recurrent(), linear(), Recurrent())


def test_a_part_of_a_storage_that_changes_between_layers_goes_again() -> None:
    """The second part has a version of its own, and is changed when the whole storage is on its way."""
    parts: list[Tensor] = []

    def first(x: Tensor) -> Tensor:
        parts[:] = (x * 1.0).unsafe_chunk(2, dim=0)
        return parts[0].square().repeat(2, 1)

    def second(x: Tensor) -> Tensor:
        changed = parts[1].mul_(3)
        return x * (changed * changed).repeat(2, 1)

    check(Function(first), Function(second), linear())


def test_a_part_that_changes_when_the_host_has_its_storage_goes_again() -> None:
    """The layer between lets the first copy end: it would come back as it was before the change."""
    parts: list[Tensor] = []

    def first(x: Tensor) -> Tensor:
        parts[:] = (x * 1.0).unsafe_chunk(2, dim=0)
        return parts[0].square().repeat(2, 1)

    def third(x: Tensor) -> Tensor:
        changed = parts[1].mul_(3)
        return x * (changed * changed).repeat(2, 1)

    check(Function(first), linear(), linear(), Function(third), linear())


def test_a_storage_whose_first_graph_is_gone_is_offloaded_for_the_next() -> None:
    def twice(x: Tensor) -> Tensor:
        h = x * 2
        (h * h).sum()  # nobody goes back through this
        return h * h

    check(Function(twice), linear(), Function(twice))


def changed_in(layers: tuple[nn.Module, ...]) -> None:
    chain = Chain(*layers)
    y = chain.forward(hidden().requires_grad_())
    chain.fetch()
    y.sum().backward()


def test_a_change_in_place_is_found() -> None:
    """In the layer that saved it; and in the next one, when the copy may be half made."""

    def at_once(x: Tensor) -> Tensor:
        h = x * 2
        y = h.square()
        h.add_(1)
        return y

    with pytest.raises(RuntimeError, match="changed in place"):
        changed_in((Function(at_once), linear()))
    with pytest.raises(RuntimeError, match="changed in place"):
        changed_in((Function(torch.tanh), Function(lambda x: x.mul_(2)), linear()))


def test_a_change_after_the_copy_does_not_matter() -> None:
    kept: list[Tensor] = []

    def keeping(x: Tensor) -> Tensor:
        kept.append((x * 2).tanh())
        return kept[-1] * 2

    layers = [Function(keeping), linear(), linear(), linear()]
    expected = gradients(layers, hidden())
    chain = Chain(*layers)
    x = hidden().requires_grad_()
    y = chain.forward(x)
    kept[-1].detach().zero_()
    chain.fetch()
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], expected[0])


def test_two_backward_passes_over_one_graph() -> None:
    layers = [nn.Sequential(linear(), nn.Tanh()) for _ in range(3)]
    expected = gradients(layers, hidden())
    chain = Chain(*layers)
    x = hidden().requires_grad_()
    y = chain.forward(x).square().sum()
    chain.fetch()
    for _ in range(2):
        found = torch.autograd.grad(y, x, retain_graph=True)[0]
        assert torch.equal(found, expected[0])
    assert chain.bytes_in() > chain.bytes_out()
    again = torch.autograd.grad(y, x, create_graph=True)[0]
    second = torch.autograd.grad(again.sum(), x)[0]
    z = x
    for layer in layers:
        z = nn.Module.__call__(layer, z)
    plain = torch.autograd.grad(z.square().sum(), x, create_graph=True)[0]
    assert torch.equal(second, torch.autograd.grad(plain.sum(), x)[0])


def test_what_layers_share_stays() -> None:
    """A mask without gradients, and what the stage was called with."""
    mask = hidden().tanh()

    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x * mask

    layers = [Masked(), Masked()]
    chain = Chain(*layers)
    x = hidden().requires_grad_()
    with chain.offload.passing((0, 0), [x]):
        y = layers[1](layers[0](x.square(), mask), mask)
    chain.offload.store((0, 0))
    y.sum().backward()
    assert chain.bytes_out() == 0


def test_small_tensors_stay() -> None:
    chain = Chain(Function(torch.tanh))
    chain.forward(torch.randn(8, requires_grad=True)).sum().backward()
    assert chain.bytes_out() == 0


def test_a_backward_pass_that_never_comes_leaves_nothing() -> None:
    chain = Chain(linear(), Function(torch.tanh), linear())
    y = chain.forward(hidden().requires_grad_())
    assert not chain.is_idle
    del y
    chain.offload.abandon()
    assert chain.is_idle

    def failing(_: Tensor) -> Tensor:
        raise ValueError("no")

    chain = Chain(Function(torch.tanh), Function(torch.tanh), Function(failing))
    with pytest.raises(ValueError, match="no"):
        chain.forward(hidden().requires_grad_())
    chain.offload.abandon()
    assert chain.offload.current is None
    assert chain.is_idle


def test_nothing_moves_without_gradients() -> None:
    chain = Chain(linear(), linear())
    with torch.no_grad():
        for layer in chain.layers:
            layer(hidden())
    assert not chain.offload.pool.pieces


def test_microbatches_in_flight() -> None:
    layers = [nn.Sequential(linear(), nn.Tanh()) for _ in range(3)]
    chain = Chain(*layers)
    x = [hidden().mul_(number + 1).requires_grad_() for number in range(3)]
    losses = [chain.forward(each, number).square().sum() for number, each in enumerate(x)]
    for number in (1, 0, 2):
        chain.fetch(number)
        losses[number].backward()
        assert torch.equal(x[number].grad, gradients(layers, x[number])[0])  # type: ignore[arg-type]
    del losses
    assert chain.is_idle
    assert len(chain.offload.pool.pieces) == 9


def test_host_memory_is_used_again() -> None:
    chain = Chain(*(nn.Sequential(linear(), nn.Tanh()) for _ in range(3)))
    held = []
    for _ in range(4):
        y = chain.forward(hidden().requires_grad_()).square().sum()
        chain.fetch()
        y.backward()
        del y
        held.append(chain.offload.pool.num_bytes)
    assert held == held[:1] * 4
    assert held[0] == 3 * 4096


def test_what_does_not_fit_stays_and_is_said() -> None:
    layers = [nn.Sequential(linear(), nn.Tanh()) for _ in range(3)]
    expected = gradients(layers, hidden())
    chain = Chain(*layers, free=100)
    x = hidden().requires_grad_()
    y = chain.forward(x).square().sum()
    chain.fetch()
    assert torch.equal(torch.autograd.grad(y, x)[0], expected[0])
    assert chain.bytes_out() == 0
    assert chain.offload.pool.refusal is not None
    assert "the host has 100 B left" in chain.offload.pool.refusal


def test_memory_that_cannot_be_pinned_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(Function(torch.tanh))

    def unpinned(*_: Any) -> Tensor:
        raise HostMemoryError("4.0 KiB of host memory could not be pinned")

    monkeypatch.setattr(chain.offload.boundary, "empty", unpinned)
    x = hidden().requires_grad_()
    chain.forward(x).sum().backward()
    assert x.grad is not None
    assert chain.bytes_out() == 0
    assert chain.offload.pool.refusal == "4.0 KiB of host memory could not be pinned"


def test_what_found_no_room_goes_with_a_later_layer_that_saves_it() -> None:
    """The first layer's result, which the second saves too: it is let go as soon as the host has it."""
    free = iter([0, *[1 << 30] * 9])
    layers = [Function(torch.tanh), *(nn.Sequential(linear(), nn.Tanh()) for _ in range(3))]
    expected = gradients(layers, hidden())
    chain = Chain(*layers, free=lambda: next(free))
    storages: list[Any] = []

    def keep(_: nn.Module, __: Any, output: Tensor) -> None:
        storages.append(output.untyped_storage()._weak_ref())

    layers[0].register_forward_hook(keep)
    x = hidden().requires_grad_()
    y = chain.forward(x).square().sum()
    assert chain.offload.pool.refusal is not None
    assert chain.bytes_out() == 4 * ONE
    assert torch.UntypedStorage._expired(storages[0])  # type: ignore[no-untyped-call]
    torch.UntypedStorage._free_weak_ref(storages[0])  # type: ignore[no-untyped-call]
    chain.fetch()
    found = torch.autograd.grad(y, x)[0]
    assert torch.equal(found, expected[0])
    assert chain.bytes_in() == 4 * ONE


def test_a_missing_wait_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Sequential(linear(), nn.Tanh()) for _ in range(3)]
    chain = Chain(*layers)
    x = hidden().requires_grad_()
    y = chain.forward(x).square().sum()
    chain.fetch()
    own = OffloadedStorage._wait

    def forgetful(storage: Any) -> None:
        if not storage.is_here:
            own(storage)

    monkeypatch.setattr(OffloadedStorage, "_wait", forgetful)
    found = torch.autograd.grad(y, x)[0]
    assert not found.isfinite().all()


def test_copies_are_in_the_order_of_the_step_whoever_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where streams differ, a wait under another one than the step's would not hold for the step."""
    inside: list[bool] = [False]
    seen: list[str] = []

    @contextmanager
    def entered(_: StepStream) -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    def watched(name: str, own: Any) -> Any:
        def call(*args: Any) -> Any:
            assert inside[0], name
            seen.append(name)
            return own(*args)

        return call

    monkeypatch.setattr(StepStream, "entered", entered)
    for owner, name in ((HostBoundary, "store"), (HostBoundary, "fetch"), (Copy, "wait")):
        monkeypatch.setattr(owner, name, watched(name, getattr(owner, name)))
    chain = Chain(*(nn.Sequential(linear(), nn.Tanh()) for _ in range(3)))
    held = [chain.forward(hidden().requires_grad_()).square().sum()]
    chain.fetch()
    before = seen.count("wait")
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert chain.is_idle
    assert (seen.count("store"), seen.count("fetch")) == (3, 3)
    assert seen.count("wait") == before + 3


def test_at_most_two_layers_are_on_the_device() -> None:
    """Asserted from storages: those of each layer's storages that are here, at every moment."""
    seen: list[int] = []

    class Looking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
            look()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ARG004
            look()
            return gradients[0]

    chain: Chain
    storages: list[Any] = []

    def look() -> None:
        current = chain.offload.current
        if current is not None:
            storages[:] = [
                storage for group in [*current._groups, current._open] for storage in group.storages
            ]
        seen.append(sum(storage.num_bytes for storage in storages if storage.is_here))

    def block() -> nn.Module:
        wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))
        return nn.Sequential(wide, Function(Looking.apply))

    layers = [block() for _ in range(8)]
    chain = Chain(*layers)
    y = chain.forward(hidden().requires_grad_()).square().sum()
    forward = len(seen)
    chain.fetch()
    y.backward()
    one_layer = 4 * ONE + ONE  # the result of the tanh, and the input
    assert max(seen[:forward]) <= 2 * one_layer
    assert max(seen[forward:]) <= 2 * one_layer
    assert max(seen) > one_layer


@pytest.mark.parametrize(("size", "travels"), [(256, True), (255, False)])
def test_what_is_small_stays(size: int, travels: bool) -> None:
    """Up to a kilobyte: float32 numbers have 4 bytes."""
    chain = Chain(Function(torch.tanh), Function(torch.tanh))
    chain.forward(torch.zeros(size, requires_grad=True)).sum().backward()
    assert chain.bytes_out() == (2 * size * 4 if travels else 0)
