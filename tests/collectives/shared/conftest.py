"""The two forms of large operations: staged through slots, and read directly."""

import pytest

from tests.collectives.shared.real_ranks import Warm, world


def can_read() -> bool:
    return world()._link.can_read


@pytest.fixture(params=[False, True], ids=["staged", "direct"])
def direct(request: pytest.FixtureRequest, warm_ranks: Warm) -> bool:
    """The form of large operations; some systems do not let ranks read each other's memory."""
    if request.param and not all(warm_ranks(2).run(can_read)):
        pytest.skip("this system does not let processes read each other's memory")
    return bool(request.param)
