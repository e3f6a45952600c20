"""What this machine can do for training, and which problems it has: `examine`, then `render`.

Importing this package needs neither torch nor rich; each probe imports what it needs.
"""

from echelon.cli.doctor.examine import examine
from echelon.cli.doctor.render import render
from echelon.cli.doctor.report import Finding, Report, Section, Status

__all__ = ["Finding", "Report", "Section", "Status", "examine", "render"]
