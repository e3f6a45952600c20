"""Hidden states whose length is not divisible by the ranks along `tensor` that share them (`sequence`).

The first layer sees whole sequences. How many positions it returns, it alone says: one more than there are
tokens, or one for each patch of an image. So hidden states are padded behind it, by their last position:

    tokens ── first layer ── 7 positions ── pad ── 8, split over ranks ── … ── last layer ── cut ── loss

A stage passes the true length on to the next one, which cannot know it. With `context`, batches are padded
instead (`padding`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn

from echelon.errors import UserError
from echelon.nn.sequence import View
from echelon.nn.wrapping import Wrapping
from echelon.parallel.padding import next_multiple, pad_to, true_pair
from echelon.parallel.sequence_checks import check_gate_padding, check_weight_masks
from echelon.plan import Plan


@final
class HiddenPadding:
    """How hidden states are padded. While a forward pass runs, `view` has their true length."""

    def __init__(
        self,
        plan: Plan,
        view: View,
        not_causal: Sequence[str],
        by_heads: Collection[nn.Module],
        *,
        routes_padding: bool = False,
    ) -> None:
        """`not_causal`: classes of modules that may let positions attend to padding behind them; `by_heads`:
        dropouts of attention weights; `routes_padding`: some gates do."""
        self._routes_padding = routes_padding
        self._plan, self._view, self._not_causal, self._by_heads = plan, view, not_causal, by_heads

    def pad(self, hidden: Tensor) -> Tensor:
        """What the first layer returned, at a length that ranks share evenly."""
        length, ranks = hidden.shape[1], self._plan.tensor
        if length % ranks == 0:
            return hidden
        if self._not_causal:
            raise UserError(
                f"sequence=true tensor={ranks}: a sequence of {length} is not divisible by {ranks}, and "
                f"{', '.join(self._not_causal)} might attend to padding at its end; use sequences of a "
                f"multiple of {ranks}, or sequence=false, or causal attention that asks its view (self.view "
                "= echelon.sequence.WHOLE: docs/context.md; modules that mix no positions can have one too)"
            )
        check_weight_masks(self._by_heads, self._plan, length)
        if self._routes_padding:
            check_gate_padding(self._plan, length)
        self._view.true_length = length
        return pad_to(hidden, next_multiple(length, ranks))

    def connect(self, stages: Mapping[int, nn.Module], num_stages: int, wrapping: Wrapping) -> None:
        """Let the true length travel between the stages of a pipeline; `stages` are those of this rank."""
        for number, stage in stages.items():
            if number > 0:
                wrapping.before("sequence", stage, self._receive)
            if number < num_stages - 1:
                wrapping.after("sequence", stage, self._send)

    def _send(self, _: nn.Module, __: Any, output: Any) -> tuple[Any, int | None]:
        return output, self._view.true_length

    def _receive(self, _: nn.Module, arguments: tuple[tuple[Any, int | None]]) -> tuple[Any]:
        ((value, self._view.true_length),) = arguments
        return (value,)

    def without_padding(self, output: Any, targets: Any, *, ignores: bool) -> tuple[Any, Any]:
        """What the model returned for true positions, and its targets; see `true_pair`."""
        length = self._view.true_length
        if length is None:
            return output, targets
        padded = next_multiple(length, self._plan.tensor)
        return true_pair(output, targets, length, padded, ignores=ignores)


@final
class SplitOutput:
    """A forward hook of the first layer: the rest of the model has a part of what it returns."""

    def __init__(self, part: Callable[[Tensor], Tensor], padding: HiddenPadding | None) -> None:
        self._part, self._padding = part, padding

    def __call__(self, module: nn.Module, _: Any, output: Any) -> Tensor:
        if not isinstance(output, Tensor):
            raise UserError(
                f"sequence=true: the first layer, {type(module).__name__}, returns a "
                f"{type(output).__name__}; it must return hidden states alone, [batch, sequence, width]"
            )
        return self._part(output if self._padding is None else self._padding.pad(output))
