"""Shared memory is an acceleration behind one door: `group_over`."""

from pathlib import Path

import pytest

import echelon
from echelon import collectives

SOURCE = Path(echelon.__file__).parent
OUTSIDE = [path for path in SOURCE.rglob("*.py") if "collectives" not in path.relative_to(SOURCE).parts[0]]


@pytest.mark.parametrize("name", ["collectives.shared", "SharedGroup", "ECHELON_TRANSPORT"])
def test_no_other_package_names_shared_memory(name: str) -> None:
    assert len(OUTSIDE) > 100
    assert [str(path) for path in OUTSIDE if name in path.read_text()] == []


def test_the_package_does_not_export_it() -> None:
    assert not [name for name in collectives.__all__ if "shared" in name.lower()]
