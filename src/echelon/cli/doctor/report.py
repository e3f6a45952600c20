"""The doctor's findings, as plain data. The other modules make them, `render` shows them."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "note", "warn"]


@dataclass(frozen=True)
class Finding:
    """One row. `value` is for people; `number` is the same in bytes, seconds, bytes per second or FLOP/s.

    `remark` says what a note or a warning means for training, and how to fix it.
    """

    name: str
    value: str
    status: Status = "ok"
    remark: str = ""
    number: float | None = None


@dataclass(frozen=True)
class Section:
    """Findings under one heading."""

    title: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Report:
    """The whole examination."""

    sections: tuple[Section, ...]

    @property
    def findings(self) -> list[Finding]:
        return [finding for section in self.sections for finding in section.findings]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == "warn"]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"warnings": len(self.warnings), **dataclasses.asdict(self)}


Probe = Callable[[], Iterable[Finding]]


def section(title: str, probes: dict[str, Probe]) -> Section:
    """Run every probe. A probe that fails is itself a finding, so the doctor works on any machine."""
    findings: list[Finding] = []
    for name, probe in probes.items():
        try:
            findings += probe()
        except Exception as error:
            reason = f"could not be found out: {type(error).__name__}: {error}"
            findings.append(Finding(name, "unknown", "note", reason))
    return Section(title, tuple(findings))
