"""What experts do whose other parts are on other ranks: send tokens to them, compute, and get them back."""

from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from echelon.collectives import Group
from echelon.nn.autograd.tracing import untraced
from echelon.nn.experts import Experts
from echelon.nn.experts.overlap import run_beside
from echelon.nn.experts.sorting import sort_slots
from echelon.nn.wrapping import Wrapper, find_wrapper
from echelon.parallel.expert.dispatch import Dispatch, plan_dispatch
from echelon.parallel.expert.slots import counts_of, inverse_of, mix_rows, permute, take_rows


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
        out, back = dispatch.journey, dispatch.journey.reversed()
        arriving = out.start(take_rows(hidden_states, slots, dispatch.sent))
        run_beside()
        arriving = back.start(self._compute(out.wait(arriving), dispatch))
        return mix_rows(back.wait(arriving), top_k_weights, slots)

    def _compute(self, rows: Tensor, dispatch: Dispatch) -> Tensor:
        """What the expert of each row makes of it."""
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
    """No token came for any expert of this rank. Their gradient is zero, as it is of one expert among others
    that are used; without one, an optimizer would leave them out."""

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


def talks_in_forward(module: nn.Module) -> bool:
    """Whether replicas talk in the forward pass of `module`, so that each must run it."""
    return any(find_wrapper(inner, SpreadExperts) is not None for inner in module.modules())
