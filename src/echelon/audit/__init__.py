"""The audit of the first step: comparisons, on the user's own batch, of what a plan computes with what one
device would, before any weight changes. What it needs of an engine is given to it.
"""

from echelon.audit.report import MODES, AuditEntry, AuditResult, Mode, held, skipped
from echelon.audit.skeleton import make_skeleton

__all__ = [
    "MODES",
    "AuditEntry",
    "AuditResult",
    "Mode",
    "held",
    "make_skeleton",
    "skipped",
]
