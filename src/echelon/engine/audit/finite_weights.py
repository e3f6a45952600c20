"""Whether a training starts from numbers: weights that are NaN or infinite are named before it begins."""

from collections.abc import Iterable

from echelon.collectives.agreement import RankAgreement
from echelon.engine.audit.report import AuditResult, held
from echelon.errors import UserError
from echelon.state.ownership import OwnedSlice

NAME = "finite weights"
_NAMED = 5


def check_finite_weights(
    owned: Iterable[OwnedSlice], trained: frozenset[str], agreement: RankAgreement
) -> AuditResult:
    """An entry of the audit. `owned`: what this rank holds of each weight; `trained`: those that learn."""
    names = list(dict.fromkeys(piece.slice.name for piece in owned if _is_wrong(piece, trained)))
    agreement.check(lambda: _refuse(names, agreement.rank))
    return held(NAME)


def _is_wrong(piece: OwnedSlice, trained: frozenset[str]) -> bool:
    """Whether it holds something that is no number; a frozen one may be infinite, as masks are."""
    tensor = piece.tensor.detach()
    wrong = ~tensor.isfinite() if piece.slice.name in trained else tensor.isnan()
    return bool(wrong.any())


def _refuse(names: list[str], rank: int) -> None:
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise UserError(
            f"weights are NaN or infinite before the first step: {', '.join(names[:_NAMED])}{more}, on rank "
            f"{rank}; initialise them (torch.empty does not), or look at the file they came from; "
            "audit='off' if nothing uses them"
        )
