"""The bench of starts, with a small model on warm ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import start
from echelon.launching import Ranks


@pytest.mark.slow
def test_ranks_start_alike_from_initial_values_and_from_their_folder(
    tmp_path: Path, warm_ranks: Callable[[int], Ranks]
) -> None:
    ranks, plans = warm_ranks(4), list(start.PLANS)
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    rows, digests = [], set()
    for plan, source, written in ((plans[0], None, first), (plans[2], first, second)):
        measured = ranks.run(start.measure, start._SMALL, plan, source, written)
        digests.add(measured[0]["weights"])
        rows.append(start._row(plan, source, measured))
    assert len(digests) == 1
    assert [(row.case, row.contender) for row in rows] == [
        (plans[0], "initial values"),
        (plans[2], "Hugging Face folder"),
    ]
    quarter = start._SMALL.num_parameters * 4 / 4
    for row in rows:
        assert quarter <= row.extras["owned_bytes"] < 1.3 * quarter
        assert 0 < row.extras["start_limit_bytes"] < row.extras["step_limit_bytes"]
        assert row.extras["step_peak_bytes"] > 0
