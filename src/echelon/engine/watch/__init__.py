"""Changes by hand to what the engine owns: taken over, or refused by name."""

from echelon.engine.watch.outside import Inside, guard_outside
from echelon.engine.watch.watch import Watch

__all__ = ["Inside", "Watch", "guard_outside"]
