"""What of a plan the engine can run today. A plan may be valid and still wait for its part of the engine."""

from echelon.errors import raise_errors
from echelon.plan import Plan
from echelon.plan.fields import FIELDS

# Field → the values that run. Every strategy that is added widens its line here.
_RUNS: dict[str, tuple[object, ...]] = {
    "sync": ("all-reduce", "parameter-server", "async"),
    "zero": (0, 1, 2, 3),
    "precision": ("fp64", "fp32", "bf16", "fp16"),
    "recompute": ("none", "full", "selective", "sqrt", "budget"),
    "checkpoints": ("whole", "split"),
    "contiguous": (False, True),
    "update": ("step", "backward", "last-backward"),
    "masters": (True, False),
}


def supported_plan(plan: Plan | str) -> Plan:
    """The plan, from its text if need be, if this version can run it."""
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    refuse_unsupported(plan)
    return plan


def refuse_unsupported(plan: Plan) -> None:
    """Raise one UserError that names every choice of `plan` which this version cannot run yet."""
    raise_errors(
        f"plan '{plan}', which this version cannot run yet",
        [
            f"{name}={_show(name, getattr(plan, name))} is not implemented yet (only "
            f"{', '.join(f'{name}={_show(name, value)}' for value in values)})"
            for name, values in _RUNS.items()
            if _kind(getattr(plan, name)) not in values
        ],
    )


def _kind(value: object) -> object:
    """'budget' of 'budget:1024'."""
    return value.partition(":")[0] if isinstance(value, str) else value


def _show(name: str, value: object) -> str:
    return FIELDS[name].show(value) or "none"
