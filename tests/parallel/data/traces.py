"""What a strategy does in a step, as text: messages, waits, modules and memory, in their order.

    forward 0   AGp32 fetch16 F0 ~AGp32 …   a gather of 32 bytes of parameters begins, and a fetch from host
                                            memory; layer 0 runs; somebody waits for the gather
    memory      parameters 96 gradients 0   bytes, of this rank's device

Letters behind an operation: of its axis, if that is not `data`, and of its subject.
"""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from echelon.collectives import Ledger
from echelon.collectives.boundary import AXIS as HOST
from echelon.collectives.group import Reduction, Work
from echelon.collectives.ledger import Move, Traffic
from echelon.parallel.data.sharing import Sharing, SummedUnit
from echelon.parallel.data.zero.zero import Zero
from tests.groups import PartialGroup


@final
class Trace:
    """Lines of words."""

    def __init__(self) -> None:
        self.lines: list[list[str]] = []

    def line(self, title: str) -> None:
        self.lines.append([f"{title:<11}"])

    def word(self, word: str) -> None:
        self.lines[-1].append(word)

    def text(self) -> str:
        return "\n".join(" ".join(line).rstrip() for line in self.lines) + "\n"


@final
class TracedLedger(Ledger):
    """Notes copies to and from host memory."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def begin(self, axis: str, operation: str, traffic: Traffic, *start: float) -> Move:
        if axis == HOST:
            self.trace.word(f"{operation}{traffic.payload}")
        return super().begin(axis, operation, traffic, *start)


@final
class _TracedWork(Work):
    def __init__(self, trace: Trace, word: str, finish: Callable[[], object], *held: Tensor) -> None:
        self._trace, self._word, self._finish, self._held = trace, word, finish, held

    def wait(self) -> None:
        self._trace.word(f"~{self._word}")
        self._finish()


@final
class TracedGroup(PartialGroup):
    """Pretends to be rank r of N, all of which hold the same tensors. Operations take effect when they are
    waited for."""

    def __init__(self, ledger: TracedLedger, rank: int, size: int, axis: str = "data") -> None:
        super().__init__(axis, rank, size, ledger)
        self._trace = ledger.trace

    def _begin(self, name: str, tensor: Tensor, finish: Callable[[], object], *held: Tensor) -> Work:
        word = f"{name}{self.axis[0] if self.axis != 'data' else ''}{self.ledger.subject[:1]}{tensor.nbytes}"
        self._trace.word(word)
        return _TracedWork(self._trace, word, finish, tensor, *held)

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        factor = self.size if op == "sum" else 1
        return self._begin("AR", tensor, lambda: tensor.mul_(factor))

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: Reduction) -> Work:
        assert op == "sum"
        part = tensor.view(self.size, -1)[self.rank]
        return self._begin("RS", tensor, lambda: output.view(-1).copy_(part * self.size), output)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        sent = tensor.clone().view(1, -1)
        return self._begin("AG", output, lambda: output.view(self.size, -1).copy_(sent))

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._begin(f"BC{source}:", tensor, lambda: None)

    def _send(self, tensor: Tensor, target: int) -> Work:
        return self._begin(f"S{target}:", tensor, lambda: None)

    def _recv(self, tensor: Tensor, source: int) -> Work:
        return self._begin(f"R{source}:", tensor, lambda: tensor.fill_(1.0))


class Layer(nn.Module):
    """x·w + b, and something that is never used."""

    def __init__(self, value: float, *, bias: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 2), value))
        self.bias = nn.Parameter(torch.ones(2)) if bias else None
        self.unused = nn.Parameter(torch.ones(3)) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


def make_model() -> nn.Sequential:
    """A first layer whose input has no gradient, one with a bias, a frozen one, one with an unused weight."""
    model = nn.Sequential(
        Layer(1.0), Layer(0.5, bias=True), Layer(0.5).requires_grad_(False), Layer(1.0, unused=True)
    )
    for parameter in model.double().parameters():
        parameter.data += torch.arange(parameter.numel()).view_as(parameter) / 4
    return model


def trace_steps(
    trace: Trace, sharing: Sharing, model: nn.Sequential, num_microbatches: int, *, in_backward: bool = False
) -> None:
    """Two steps with a rate of 1/64 in float64, so that all numbers are exact."""
    handles = [
        *(
            layer.register_forward_pre_hook(lambda *_, n=n: trace.word(f"F{n}"))
            for n, layer in enumerate(model)
        ),
        *(
            layer.weight.register_hook(lambda _, n=n: trace.word(f"B{n}"))
            for n, layer in enumerate(model)
            if layer.weight.requires_grad
        ),
    ]

    def update(local: Any) -> None:
        for each in local:
            if each.tensor.grad is not None:
                each.tensor.data.sub_(each.tensor.grad, alpha=1 / 64)
                trace.word(f"U{each.name}")

    def on_unit(unit: SummedUnit) -> None:
        trace.word(f"norm{sum(float(share.square().sum()) for share in unit.norm_share):g}")
        with unit.present():
            update(unit.local)

    if in_backward:
        sharing.update_in_backward(on_unit)
    for step in range(2):
        trace.line(f"step {step}")
        sharing.start_step()
        for number in range(num_microbatches):
            trace.line(f"forward {number}")
            sharing.gather(backward=False)
            total = model(torch.tensor([[1.0, number + 1.0]], dtype=torch.float64)).sum()
            sharing.free()
            trace.line(f"backward {number}")
            sharing.gather(backward=True)
            sharing.start_backward(last=number == num_microbatches - 1)
            total.backward()
            sharing.finish_backward()
            sharing.free()
        trace.line("reduce")
        sharing.reduce()
        _note_memory(trace, sharing)
        trace.line("update")
        if step == 0:
            sharing.end_watch()
        if not in_backward:
            trace.word(f"norm{sum(float(share.square().sum()) for share in sharing.norm_share()):g}")
        for local in sharing.pieces_to_update():
            update([] if in_backward else local)
        trace.line("publish")
        sharing.publish()
        _note_memory(trace, sharing)
        for owned in sharing.owned():
            trace.line(owned.slice.name)
            trace.word(f"{list(owned.slice.offsets)} {owned.tensor.flatten().tolist()}")
    for handle in handles:
        handle.remove()


def _note_memory(trace: Trace, sharing: Sharing) -> None:
    trace.line("memory")
    for kind, tensors in sharing.storages()._asdict().items():
        unique = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        trace.word(f"{kind} {sum(unique.values())}")
    if isinstance(sharing, Zero):
        trace.word(f"gathered {sharing.residency.num_gathered}")
