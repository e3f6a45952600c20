"""echelon doctor: what this machine can do for training, what is missing, and what that costs.

Findings are plain data. Importing this package imports no probe; each probe imports what it needs.
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from echelon.cli.options import Json, console, print_json
from echelon.quantities import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

Status = Literal["ok", "note", "warn"]
Probe = Callable[[], Iterable["Finding"]]

_MARKS: dict[Status, tuple[str, str]] = {"ok": ("✓", "green"), "note": ("·", "cyan"), "warn": ("!", "yellow")}


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
        return {"warnings": len(self.warnings), **dataclasses.asdict(self)}


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


def render(report: Report) -> "RenderableType":
    """Make a row per finding under the titles of the sections, and a line with the number of warnings."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for section in report.sections:
        table.add_row("", Text(section.title, "bold"))
        for finding in section.findings:
            # Text, not str: a value may be taken for markup.
            mark, remark = Text(*_MARKS[finding.status]), Text(finding.remark, "dim")
            table.add_row(mark, Text(finding.name), Text(finding.value), remark)
        table.add_row()
    number = len(report.warnings)
    if number == 0:
        return Group(table, Text("No problems found.", "green"))
    return Group(table, Text(f"{counted(number, 'warning')}: see the lines with !", "yellow"))


def doctor(as_json: Json = False) -> None:
    """Show what this machine can do, what is missing, and what that costs."""
    screen = console(as_json)
    with screen.status("measuring …"):
        report = examine()
    if as_json:
        print_json(report.to_dict())
    else:
        screen.print(render(report))


def examine() -> Report:
    """Examine this machine; takes a few seconds, most of them for measuring."""
    from echelon.cli.doctor import machine

    first = (machine.examine_versions(), machine.examine_machine(), machine.examine_devices())
    return Report((*first, machine.examine_speed(), machine.examine_extras()))
