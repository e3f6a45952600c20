"""The doctor's report for a terminal. Only this module imports rich, and only when something is rendered."""

from typing import TYPE_CHECKING

from echelon.cli.doctor.report import Report, Status

if TYPE_CHECKING:
    from rich.console import RenderableType

_MARKS: dict[Status, tuple[str, str]] = {"ok": ("✓", "green"), "note": ("·", "cyan"), "warn": ("!", "yellow")}


def render(report: Report) -> "RenderableType":
    """One row per finding under the titles of the sections, and a last line with the number of warnings."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for section in report.sections:
        table.add_row("", Text(section.title, "bold"))
        for finding in section.findings:
            # Text, not str: a value may look like markup.
            mark, remark = Text(*_MARKS[finding.status]), Text(finding.remark, "dim")
            table.add_row(mark, Text(finding.name), Text(finding.value), remark)
        table.add_row()
    return Group(table, Text(*_last_line(len(report.warnings))))


def _last_line(warnings: int) -> tuple[str, str]:
    if warnings == 0:
        return "No problems found.", "green"
    count = "1 warning" if warnings == 1 else f"{warnings} warnings"
    return f"{count}: see the lines with !", "yellow"
