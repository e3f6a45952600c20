"""A rank of a plan of any size, run in one process: without its peers, and without memory for its tensors."""

from echelon.engine.dry_run.dry_run import DryRun, dry_run

__all__ = ["DryRun", "dry_run"]
