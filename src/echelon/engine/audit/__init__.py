"""The audit of steps: a plan against one device, copies of weights against each other, layers that are not
finite. This file has what an entry of the audit finds out.
"""

from typing import Literal, NamedTuple

Mode = Literal["first", "sampled", "always", "off"]
MODES: tuple[Mode, ...] = ("first", "sampled", "always", "off")


class AuditResult(NamedTuple):
    """One entry, the same on every rank. A difference is no result: it is a UserError on every rank.
    `reason`: why it was skipped, or what "held" leaves out. `is_final`: False where another batch may tell
    more, so that the next step asks again."""

    name: str
    outcome: Literal["held", "skipped"]
    reason: str = ""
    is_final: bool = True

    def __str__(self) -> str:
        return f"{self.name}: {self.outcome}" + (f" ({self.reason})" if self.reason else "")


def held(name: str, reason: str = "") -> AuditResult:
    return AuditResult(name, "held", reason)


def skipped(name: str, reason: str, *, is_final: bool = True) -> AuditResult:
    return AuditResult(name, "skipped", reason, is_final)
