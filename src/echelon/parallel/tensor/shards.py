"""Which parameters of a module its style splits, along which dim."""

from typing import NamedTuple

from torch import Tensor, nn

from echelon.nn.huggingface.modules import is_transposed
from echelon.parallel.tensor.styles import Style


class Cut(NamedTuple):
    """The parameter `name` of a module is split along `dim`; it is matrices in one, in these proportions."""

    name: str
    dim: int
    parts: tuple[int, ...] = (1,)

    def sizes(self, parameter: Tensor) -> tuple[int, ...]:
        """The sizes of the matrices, which are the dim together."""
        unit = parameter.shape[self.dim] // sum(self.parts)
        return tuple(unit * part for part in self.parts)


def cuts(module: nn.Module, style: Style) -> list[Cut]:
    """The parameters of a module that its style splits."""
    outputs, inputs = (1, 0) if is_transposed(module) else (0, 1)
    if style.word == "experts":
        first = Cut("gate_up_proj", 1, (1, 1)) if hasattr(module, "gate_up_proj") else Cut("up_proj", 1)
        return [first, Cut("down_proj", 2)]
    if isinstance(module, nn.Embedding) and style.word in ("vocabulary", "column"):
        return [Cut("weight", 0 if style.word == "vocabulary" else 1, style.parts)]
    if style.word == "norm":
        return [Cut(name, 0) for name in ("weight", "bias") if name in module._parameters]
    if style.word in ("column", "vocabulary") and not style.whole:
        return [Cut("weight", outputs, style.parts), Cut("bias", 0, style.parts)]
    return [Cut("weight", inputs)] if style.word == "row" else []


def rows_of_rank(style: Style, size: int, rank: int, ranks: int) -> list[tuple[int, int]]:
    """Where the outputs of a column lie that a rank computes, as (begin, end); some parts it uses whole."""
    unit, begin, spans = size // sum(style.parts), 0, []
    for index, part in enumerate(style.parts):
        is_whole = index in style.whole
        share = unit * part if is_whole else unit * part // ranks
        first = begin if is_whole else begin + share * rank
        spans.append((first, first + share))
        begin += unit * part
    return spans
