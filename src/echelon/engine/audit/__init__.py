"""What audits stand on: the plain form of a model, agreement of ranks, what was found. The audit itself,
which runs an engine's steps, is in `echelon.engine`; drift compares copies of weights in later steps.
"""

from echelon.engine.audit.report import MODES, AuditResult, Mode, held, skipped

__all__ = ["MODES", "AuditResult", "Mode", "held", "skipped"]
