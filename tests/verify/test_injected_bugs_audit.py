"""The audit of a running engine finds every injected bug that makes gradients differ, within eight steps."""

from collections.abc import Callable

import pytest
import torch

from echelon.engine import parallelize
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.plan import Plan
from echelon.verify import Case
from echelon.verify.inject_bug import inject
from tests.injected_bugs import rows

STEPS = 8


def train(case: Case, plan: str, bug: str | None) -> str:
    """What stops the training on this rank; nothing, if it goes through."""
    engine = parallelize(
        case.build().float(), plan, optimizer=case.make_optimizer, loss=case.loss, clip=case.clip
    )
    if bug is not None:
        inject(bug, engine)
    try:
        for batch in case.batches(torch.float32):
            engine.step(engine.local(batch))
        engine.synchronize()
    except UserError as refusal:
        return str(refusal)
    engine.close(restore=False)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("bug", [bug for bug, row in rows().items() if row.changes_gradients])
def test_the_audit_refuses_a_broken_engine_on_every_rank(
    bug: str, warm_ranks: Callable[[int], Ranks]
) -> None:
    row = rows()[bug]
    case, ranks = row.case(STEPS), warm_ranks(Plan.parse(row.plan).ranks)
    assert all(ranks.run(train, case, row.plan, bug)), "the audit has not found the bug"
    assert not any(ranks.run(train, case, row.plan, None)), "the audit refuses a plan without a bug"
