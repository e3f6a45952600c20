"""What this machine can do for training, and what stands in the way: `examine`, then `render`.

Importing this needs neither torch nor rich; a probe imports what it asks about.
"""

from echelon.doctor.examine import examine
from echelon.doctor.render import render
from echelon.doctor.report import Finding, Report, Section, Status

__all__ = ["Finding", "Report", "Section", "Status", "examine", "render"]
