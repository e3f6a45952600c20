"""echelon doctor: what this machine can do for training, what is missing, and what that costs.

Importing this package imports no probe; each probe imports what it needs.
"""

from typing import TYPE_CHECKING

from echelon.cli.options import Json, console, print_json

if TYPE_CHECKING:
    from echelon.cli.doctor.report import Report


def doctor(as_json: Json = False) -> None:
    """Show what this machine can do, what is missing, and what that costs."""
    from echelon.cli.doctor.report import render

    screen = console(as_json)
    with screen.status("measuring …"):
        report = examine()
    if as_json:
        print_json(report.to_dict())
    else:
        screen.print(render(report))


def examine() -> "Report":
    """Examine this machine; takes a few seconds, most of them for measuring."""
    from echelon.cli.doctor.machine import (
        examine_devices,
        examine_extras,
        examine_machine,
        examine_speed,
        examine_versions,
    )
    from echelon.cli.doctor.report import Report

    sections = examine_versions, examine_machine, examine_devices, examine_speed, examine_extras
    return Report(tuple(examine_section() for examine_section in sections))
