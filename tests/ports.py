"""A port for processes that a test starts.

It is free between this choice and its use, while other tests open connections. The system takes the ports of
these from a range of its own (32768 and above on Linux), so this port lies below.
"""

import socket
from contextlib import suppress
from random import SystemRandom


def free_port() -> int:
    while True:
        port = SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
