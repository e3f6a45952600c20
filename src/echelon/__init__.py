"""Train PyTorch models that are too large or too slow for one device.

    import echelon

    def main():
        with echelon.parallelize(model, "data=2", optimizer=..., loss=...) as engine:
            for batch in loader:
                metrics = engine.step(batch)
            return engine.full_state_dict()

    results = echelon.launch(main, ranks=2)      # or: torchrun --nproc-per-node 2 script.py

Names are found on first use: `import echelon` alone does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from echelon.version import VERSION

if TYPE_CHECKING:
    from echelon import data, experts, integrations, optim, sequence
    from echelon.engine import Engine, Evaluation, Metrics
    from echelon.engine.dry_run import DryRun, dry_run
    from echelon.engine.parallelize import parallelize
    from echelon.errors import UserError
    from echelon.launching import PeerLost, RankFailed, RankHung, Ranks, launch
    from echelon.memory import Memory
    from echelon.nn.batch import Inputs
    from echelon.nn.initialization.initial_values import deferred
    from echelon.nn.losses import Sum
    from echelon.nn.sample_gathering import gather_samples
    from echelon.plan import Plan
    from echelon.report.live_chart import live_chart
    from echelon.train.trackers import Tracker
    from echelon.train.tracking import track

__version__ = VERSION

# Name → the module that has it. Found on first use, so that plans and commands start without torch.
_HOME = {
    "DryRun": "echelon.engine.dry_run",
    "Engine": "echelon.engine",
    "Evaluation": "echelon.engine",
    "Inputs": "echelon.nn.batch",
    "Memory": "echelon.memory",
    "Metrics": "echelon.engine",
    "PeerLost": "echelon.launching",
    "Plan": "echelon.plan",
    "RankFailed": "echelon.launching",
    "RankHung": "echelon.launching",
    "Ranks": "echelon.launching",
    "Sum": "echelon.nn.losses",
    "Tracker": "echelon.train.trackers",
    "UserError": "echelon.errors",
    "deferred": "echelon.nn.initialization.initial_values",
    "dry_run": "echelon.engine.dry_run",
    "gather_samples": "echelon.nn.sample_gathering",
    "launch": "echelon.launching",
    "live_chart": "echelon.report.live_chart",
    "parallelize": "echelon.engine",
    "track": "echelon.train.tracking",
}

# Modules that users write with: echelon.optim.Adafactor.
_MODULES = ("data", "experts", "integrations", "optim", "sequence")

__all__ = [
    "DryRun",
    "Engine",
    "Evaluation",
    "Inputs",
    "Memory",
    "Metrics",
    "PeerLost",
    "Plan",
    "RankFailed",
    "RankHung",
    "Ranks",
    "Sum",
    "Tracker",
    "UserError",
    "data",
    "deferred",
    "dry_run",
    "experts",
    "gather_samples",
    "integrations",
    "launch",
    "live_chart",
    "optim",
    "parallelize",
    "sequence",
    "track",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"echelon.{name}")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'echelon' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
