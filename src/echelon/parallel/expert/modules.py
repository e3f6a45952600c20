"""Experts that are spread over ranks: tokens go to their experts by all-to-all, and the results come back.

    tokens here ── sorted by expert ── all-to-all ──▶ experts here compute rows of all ranks
    mixed by weight ◀── all-to-all ───────────────────────────┘

The backward pass sends gradients the same ways, in reverse.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from echelon.collectives import Group, Handle
from echelon.nn.autograd.second_run import once
from echelon.nn.experts import Experts
from echelon.nn.experts.layer import run_beside
from echelon.nn.experts.rows import Slots, gather_rows, sort_slots, sort_weights, sum_slots
from echelon.nn.tracing import untraced
from echelon.nn.wrapping import Wrapper, find_wrapper

SUBJECT = "experts"


@final
class RowExchange:
    """An all-to-all of rows, and of their gradients in reverse.

    `sent`, `received`: the rows to and from each rank of `group`. Work can run between `start` and `wait`.
    """

    def __init__(self, group: Group, sent: Sequence[int], received: Sequence[int]) -> None:
        self._group, self._sent, self._received = group, list(sent), list(received)
        # Its handle, the rows that come, and those that leave: their memory must live until it is over.
        self._under_way: tuple[Handle, Tensor, Tensor] | None = None

    def reversed(self) -> "RowExchange":
        """The exchange that returns all rows to the ranks that they came from."""
        return RowExchange(self._group, self._received, self._sent)

    def start(self, rows: Tensor) -> Tensor:
        """Begin to send rows; the tensor that is returned holds those that come, after `wait`."""
        arriving: Tensor = _Start.apply(rows, self)  # type: ignore[no-untyped-call]
        return arriving

    def wait(self, arriving: Tensor) -> Tensor:
        arrived: Tensor = _Wait.apply(arriving, self)  # type: ignore[no-untyped-call]
        return arrived

    def begin(self, rows: Tensor, *, back: bool) -> Tensor:
        outgoing = rows.contiguous()
        to_all, from_all = (self._received, self._sent) if back else (self._sent, self._received)
        incoming = rows.new_empty(sum(from_all), *rows.shape[1:])
        with self._group.ledger.about(SUBJECT):
            handle = self._group.all_to_all(incoming, outgoing, from_all, to_all, wait=False)
        self._under_way = (handle, incoming, outgoing)
        return incoming

    def end(self) -> Tensor:
        assert self._under_way is not None, "nothing is under way"
        handle, incoming, _ = self._under_way
        self._under_way = None
        handle.wait()
        return incoming


class _Start(torch.autograd.Function):
    runs_once = True  # all ranks take part in its backward pass

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.begin(rows, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.end(), None


class _Wait(torch.autograd.Function):
    runs_once = True

    @staticmethod
    def forward(ctx: Any, arriving: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.end()
        return arriving.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.begin(gradient, back=True)
        return gradient.new_zeros(()).expand_as(gradient), None  # which `_Start` ignores


class Dispatch(NamedTuple):
    """The exchange that brings the slots of all ranks of a group to the experts.

    `sent`: how many rows leave, also those to this rank itself. `counts` [ranks, experts here]: how many rows
    of each expert come from each rank.
    """

    exchange: RowExchange
    sent: int
    received: int
    counts: Tensor

    @property
    def expert_of_row(self) -> Tensor:
        """For each row that comes, the number of its expert among this rank's."""
        ranks, experts = self.counts.shape
        numbers = torch.arange(experts, device=self.counts.device).repeat(ranks)
        return numbers.repeat_interleave(self.counts.flatten(), output_size=self.received)


def plan_dispatch(counts: Tensor, group: Group) -> Dispatch:
    """Tell the other ranks how many slots of each expert this one has; all ranks of the group together.

    A forward that runs again takes the numbers of the first run: other ranks may not run it again.
    """
    coming, sent, received = once(lambda: _exchange_counts(counts, group))
    return Dispatch(RowExchange(group, sent, received), sum(sent), sum(received), coming)


def _exchange_counts(counts: Tensor, group: Group) -> tuple[Tensor, list[int], list[int]]:
    coming = torch.empty_like(counts)
    with group.ledger.about("expert counts"):
        group.all_to_all(coming, counts)
    both = torch.stack([counts, coming]).view(2, group.size, -1)
    sent, received = both.sum(2).tolist()  # the only numbers of a step that the host must read
    return both[1], sent, received


@final
class SpreadExperts(Wrapper):
    """This rank's experts compute the tokens of all ranks of `group`, and the other ranks' experts its own.

    The module is called with rows of one expert each, of weight 1: its output must be linear in the weights.
    """

    entry: ClassVar[str] = "expert"

    def __init__(self, module: nn.Module, group: Group, num_experts: int) -> None:
        """`num_experts`: over all ranks."""
        super().__init__(module)
        self.group, self.num_experts = group, num_experts

    @untraced
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        slots = sort_slots(top_k_index, self.num_experts)
        dispatch = plan_dispatch(counts_of(slots), self.group)
        out, back = dispatch.exchange, dispatch.exchange.reversed()
        arriving = out.start(take_rows(hidden_states, slots, dispatch.sent))
        run_beside()
        arriving = back.start(self._compute(out.wait(arriving), dispatch))
        return mix_rows(back.wait(arriving), top_k_weights, slots)

    def _compute(self, rows: Tensor, dispatch: Dispatch) -> Tensor:
        """Let the expert of each row compute it."""
        if dispatch.received == 0:
            form = self._form_of_output(rows)
            unused: Tensor = _Unused.apply(rows, form, *self.module.parameters())  # type: ignore[no-untyped-call]
            return unused
        if isinstance(self.module, Experts):
            return self._compute_sorted(self.module, rows, dispatch)
        index = dispatch.expert_of_row[:, None]
        computed: Tensor = self.inner(rows, index, rows.new_ones(index.shape))
        return computed

    @torch.no_grad()
    def _form_of_output(self, rows: Tensor) -> Tensor:
        """No rows, of the width and type of what experts make of some: other ranks send such. They make it of
        one row of zeros, since not every module can be called with none."""
        row = rows.new_zeros(1, *rows.shape[1:])
        index = torch.zeros(1, 1, dtype=torch.long, device=rows.device)
        computed: Tensor = self.inner(row, index, row.new_ones(1, 1))
        return computed[:0]

    def _compute_sorted(self, module: Experts, rows: Tensor, dispatch: Dispatch) -> Tensor:
        """Rows come from one rank after the other; experts compute those of all ranks together."""
        counts = dispatch.counts.sum(0)
        if len(counts) == 1:
            return module.compute(rows, counts)
        order = dispatch.expert_of_row.argsort(stable=True)
        inverse = inverse_of(order)
        return permute(module.compute(permute(rows, order, inverse), counts), inverse, order)


class _Unused(torch.autograd.Function):
    """No token came for this rank's experts. Their gradient is zero: without, optimizers leave them out."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, form: Tensor, *parameters: nn.Parameter) -> Tensor:
        ctx.forms = [(p.shape, p.dtype, p.device) for p in (rows, *parameters)]
        return form.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        is_needed = ctx.needs_input_grad[0], *ctx.needs_input_grad[2:]
        of_rows, *zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in zip(ctx.forms, is_needed, strict=True)
        ]
        return of_rows, None, *zeros


def experts_of(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of which ranks along `expert` hold different parts."""
    spread = [inner for inner in module.modules() if find_wrapper(inner, SpreadExperts) is not None]
    return list(dict.fromkeys(p for inner in spread for p in inner.parameters()))


# Rows of slots, sorted by expert, and back: as `experts.sorting`, with gradients and no dropped slots.


def counts_of(slots: Slots) -> Tensor:
    return slots.ends.long().diff(prepend=slots.ends.new_zeros(1))


def take_rows(hidden_states: Tensor, slots: Slots, number: int) -> Tensor:
    """The token of each of the first `number` slots, as rows."""
    rows: Tensor = _TakeRows.apply(hidden_states, slots, number)  # type: ignore[no-untyped-call]
    return rows


def mix_rows(rows: Tensor, weights: Tensor, slots: Slots) -> Tensor:
    """The sum over the slots of each token, of the first slots' rows weighted by `weights` [tokens, k]."""
    mixed: Tensor = _MixRows.apply(rows, weights, slots)  # type: ignore[no-untyped-call]
    return mixed


def inverse_of(order: Tensor) -> Tensor:
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    permuted: Tensor = _Permute.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
    return permuted


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, slots: Slots, number: int) -> Tensor:
        ctx.slots = slots
        return gather_rows(hidden_states.contiguous(), _first(slots, number))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return sum_slots(_padded(gradient, ctx.slots), ctx.slots), None, None


class _MixRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, slots: Slots) -> Tensor:
        ctx.slots = slots
        ctx.save_for_backward(rows, weights)
        weighted = rows * sort_weights(weights, slots)[: len(rows), None]
        return sum_slots(_padded(weighted, slots), slots).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        slots: Slots = ctx.slots
        rows, weights = ctx.saved_tensors
        of_slots = gather_rows(gradient.contiguous(), _first(slots, len(rows)))
        for_weights = None
        if ctx.needs_input_grad[1]:
            products = _padded((of_slots * rows).sum(1, keepdim=True), slots)
            for_weights = products[slots.inverse, 0].to(weights.dtype)
        weighted = of_slots * sort_weights(weights, slots)[: len(rows), None]
        return weighted.to(rows.dtype), for_weights, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse), None, None


def _padded(rows: Tensor, slots: Slots) -> Tensor:
    """Rows of all slots; those of dropped ones are zeros."""
    missing = slots.inverse.numel() - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows


def _first(slots: Slots, number: int) -> Slots:
    return slots._replace(order=slots.order[:number])
