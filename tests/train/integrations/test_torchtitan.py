"""The configurations of docs/migrate.md are torchtitan's, and its axes are those of the plans beside them.

Its models and its trainer import triton, which is for GPUs: no loop of it runs here.
"""

import ast
import json
import re

from echelon.plan import Plan
from tests.test_migrate import PAGE
from tests.train.integrations import packages

LINE = re.compile(r"^# (.+)\nParallelismConfig\((.*)\)$", re.MULTILINE)


def fields_of(arguments: str) -> dict[str, object]:
    call = ast.parse(f"f({arguments})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}


def test_each_configuration_has_the_axes_of_its_plan() -> None:
    packages.need("torchtitan", "tyro", "docstring_parser", "typeguard", "spmd_types")
    plans = [Plan.parse(plan) for plan, _ in LINE.findall(PAGE)]
    configurations = [fields_of(arguments) for _, arguments in LINE.findall(PAGE)]
    pairs = [(fields, plan.ranks) for fields, plan in zip(configurations, plans, strict=True)]
    found = packages.run_program("titan_plans.py", json.dumps(pairs))
    assert len(found) >= 6
    for (data, shard, *others), plan in zip(found, plans, strict=True):
        assert data == plan.data
        assert shard == (plan.shard or plan.data)
        assert others == [plan.tensor, plan.pipeline, plan.context, plan.expert]


def test_the_plans_are_plans() -> None:
    """Also where torchtitan is not installed."""
    assert [Plan.parse(plan).ranks for plan, _ in LINE.findall(PAGE)] == [4, 8, 2, 2, 2, 4]
