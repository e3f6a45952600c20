"""What of a plan the engine can run today. A plan may be valid and still wait for its part of the engine."""

from echelon.errors import raise_errors
from echelon.plan import Plan

# Field → the values that run. Every strategy that is added widens its line here.
_RUNS: dict[str, tuple[object, ...]] = {
    "expert": (1,),
    "sync": ("all-reduce", "parameter-server", "async"),
    "zero": (0, 1, 2, 3),
    "precision": ("fp64", "fp32", "bf16"),
    "recompute": ("none",),
    "offload": ((),),
    "compress": ("none",),
}


def refuse_unsupported(plan: Plan) -> None:
    """Raise one UserError that names every choice of `plan` which this version cannot run yet."""
    raise_errors(
        f"plan '{plan}', which this version cannot run yet",
        [
            f"{name}={getattr(plan, name)}: this version runs {name} = "
            f"{', '.join(str(value or 'none') if name == 'offload' else str(value) for value in values)}"
            for name, values in _RUNS.items()
            if getattr(plan, name) not in values
        ],
    )
