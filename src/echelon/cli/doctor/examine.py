"""`examine`: all sections of the report, in the order in which they are read."""

from echelon.cli.doctor.machine import examine_devices, examine_machine
from echelon.cli.doctor.packages import examine_extras, examine_versions
from echelon.cli.doctor.report import Report
from echelon.cli.doctor.speed import examine_speed


def examine() -> Report:
    """Look at this machine; takes a few seconds, most of them for measuring."""
    return Report(
        (
            examine_versions(),
            examine_machine(),
            examine_devices(),
            examine_speed(),
            examine_extras(),
        )
    )
