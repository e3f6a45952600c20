"""The equality contract, as a function, as a test helper, and (in the command) as `echelon verify`."""

from echelon.verify.case import Case
from echelon.verify.contract import PRECISIONS, Precision, assert_equal, verify
from echelon.verify.low_precision import LowPrecisionVerdict
from echelon.verify.verdict import TOLERANCE, Verdict

__all__ = [
    "PRECISIONS",
    "TOLERANCE",
    "Case",
    "LowPrecisionVerdict",
    "Precision",
    "Verdict",
    "assert_equal",
    "verify",
]
