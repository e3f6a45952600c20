"""What layers compute with and keep: every rule refuses what it should, and names a fix that works."""

import pytest

from echelon.plan.compute import Compute
from tests.plan.examples import Examples, cases_of, check_rule, rules_of

EXAMPLES: Examples = {
    "`sequence=true` with `tensor=1`": [("sequence=true", "set tensor=2 or more", "sequence=true tensor=2")],
    "`precision=fp8` with `schedule=zero-bubble`": [
        (
            "pipeline=2 schedule=zero-bubble precision=fp8",
            "use schedule=1f1b",
            "pipeline=2 schedule=1f1b precision=fp8",
        ),
    ],
    "`compile=true` with `schedule=zero-bubble`": [
        (
            "pipeline=2 schedule=zero-bubble compile=true",
            "use schedule=1f1b, or drop compile",
            "pipeline=2 schedule=1f1b compile=true",
        ),
    ],
    "`gradients=same` with `precision=fp32` or `fp64`": [
        ("gradients=same", "drop gradients, or use precision=bf16", "gradients=same precision=bf16"),
        ("data=2 gradients=same precision=fp64", "precision=fp64: only", "data=2 precision=fp64"),
    ],
    "`checkpoints=split` with `recompute=none` or `selective`": [
        ("tensor=2 checkpoints=split", "use recompute=full", "tensor=2 checkpoints=split recompute=full"),
        (
            "tensor=2 checkpoints=split recompute=selective",
            "or drop checkpoints",
            "tensor=2 checkpoints=split recompute=sqrt",
        ),
    ],
    "`checkpoints=split` with `tensor=1` or `sequence=true`": [
        (
            "checkpoints=split recompute=full",
            "set tensor=2 or more",
            "tensor=2 checkpoints=split recompute=full",
        ),
        (
            "tensor=2 sequence=true checkpoints=split recompute=full",
            "without sequence",
            "tensor=2 sequence=true recompute=full",
        ),
    ],
    "`contiguous=true` with `zero` below 2 and `recompute=none` or `selective`": [
        ("contiguous=true", "use recompute=full", "contiguous=true recompute=full"),
        ("contiguous=true recompute=selective zero=1 data=2", "zero=2 or 3", "contiguous=true zero=2 data=2"),
    ],
}


@pytest.mark.parametrize("case", cases_of(Compute, EXAMPLES))
def test_a_rule_refuses_its_examples_and_they_pass_without_it(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rule(rules_of(Compute)[case], EXAMPLES[case], monkeypatch)
