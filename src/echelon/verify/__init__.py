"""The equality contract, as a function, as a test helper, and (in the command) as `echelon verify`."""

from echelon.verify.case import Case
from echelon.verify.contract import assert_equal, verify
from echelon.verify.verdict import TOLERANCE, Verdict

__all__ = ["TOLERANCE", "Case", "Verdict", "assert_equal", "verify"]
