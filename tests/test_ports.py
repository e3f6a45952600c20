from pathlib import Path

import pytest

from tests.ports import free_port

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(not RANGE.exists(), reason="Linux says there which ports it gives out")
def test_no_connection_of_another_test_can_take_the_port() -> None:
    first = int(RANGE.read_text().split()[0])
    assert all(free_port() < first for _ in range(20))
