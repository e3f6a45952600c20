"""What an entry of the audit found out: that it held, or why it could not be asked."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

Mode = Literal["first", "off", "always"]
MODES: tuple[Mode, ...] = ("first", "off", "always")


class AuditResult(NamedTuple):
    """One entry, the same on every rank. A difference is no result: it is a UserError on every rank.

    `reason`: why it was skipped, or what "held" leaves out. `is_final`: False where another batch may tell
    more, so that the next step asks again.
    """

    name: str
    outcome: Literal["held", "skipped"]
    reason: str = ""
    is_final: bool = True

    def __str__(self) -> str:
        return f"{self.name}: {self.outcome}" + (f" ({self.reason})" if self.reason else "")


# Called on all ranks together with this replica's batch, between steps: before the first microbatch of a
# step. It leaves no trace in the model, and raises a UserError on every rank where it finds a difference.
AuditEntry = Callable[[Any], AuditResult]


def held(name: str, reason: str = "") -> AuditResult:
    return AuditResult(name, "held", reason)


def skipped(name: str, reason: str, *, is_final: bool = True) -> AuditResult:
    return AuditResult(name, "skipped", reason, is_final)
