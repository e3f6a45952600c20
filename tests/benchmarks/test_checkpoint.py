"""The bench of checkpoints, with a small model on warm ranks."""

from collections.abc import Callable
from pathlib import Path

from benchmarks import checkpoint
from echelon.launching import Ranks


def test_every_case_is_measured_beside_its_baseline(
    tmp_path: Path, warm_ranks: Callable[[int], Ranks]
) -> None:
    (measured,) = warm_ranks(1).run(checkpoint.measure, str(tmp_path), 16, 2, 1, 1)
    assert list(measured) == list(checkpoint.CASES)
    for case, baseline in checkpoint.CASES.items():
        assert baseline in measured[case]
        assert "engine." in "".join(measured[case])
        assert all(len(seconds) == 1 for seconds in measured[case].values())
