"""Whether a training starts from numbers: weights that are NaN or infinite are named before it begins."""

from collections.abc import Callable, Iterable
from typing import final

import torch

from echelon.audit.agreement import RankAgreement
from echelon.audit.report import AuditResult, held
from echelon.errors import UserError
from echelon.ownership import OwnedSlice

NAME = "finite weights"
_NAMED = 5


@final
class FiniteWeights:
    """An entry of the audit. `owned`: what this rank holds of each weight; `trained`: those that learn."""

    def __init__(
        self, owned: Callable[[], Iterable[OwnedSlice]], trained: frozenset[str], agreement: RankAgreement
    ) -> None:
        self._owned, self._trained, self._agreement = owned, trained, agreement

    def __call__(self) -> AuditResult:
        names = self._not_finite()
        self._agreement.check(lambda: _refuse(names, self._agreement.rank))
        return held(NAME)

    @torch.no_grad()
    def _not_finite(self) -> list[str]:
        """Weights that are no numbers; a frozen one may be infinite, as masks are."""
        pieces = [
            each for each in self._owned() if each.tensor.is_floating_point() or each.tensor.is_complex()
        ]
        if not pieces:
            return []
        flags = [self._is_wrong(piece) for piece in pieces]
        is_wrong = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
        return list(
            dict.fromkeys(piece.slice.name for piece, flag in zip(pieces, is_wrong, strict=True) if flag)
        )

    def _is_wrong(self, piece: OwnedSlice) -> torch.Tensor:
        wrong = piece.tensor.isnan()
        if piece.slice.name in self._trained:
            wrong = ~piece.tensor.isfinite()
        return wrong.any()


def _refuse(names: list[str], rank: int) -> None:
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise UserError(
            f"weights are NaN or infinite before the first step: {', '.join(names[:_NAMED])}{more}, on rank "
            f"{rank}; initialise them (torch.empty does not), or look at the file they came from; "
            "audit='off' if nothing uses them"
        )
