"""A kernel of Jupyter in a process of its own, in which tests run cells as a notebook does."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jupyter_client.manager import start_new_kernel

SECONDS = 300


@dataclass
class Cell:
    """What a cell has shown: its streams, in the pieces in which they came, and its error."""

    pieces: list[tuple[str, str]] = field(default_factory=list)
    error: str = ""
    message: str = ""

    def text(self, name: str) -> str:
        return "".join(text for stream, text in self.pieces if stream == name)


class Kernel:
    def __init__(self, manager: Any, client: Any) -> None:
        self._manager = manager
        self._client = client

    def run(
        self,
        code: str,
        on_text: Callable[[str], object] = str,
        on_picture: Callable[[bool, str], object] = lambda *_: None,
    ) -> Cell:
        """Run a cell. `on_text(text)` is called while it runs, with each piece of text that it shows, and
        `on_picture(takes the place of another, SVG)` with each picture."""
        cell = Cell()

        def take(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                cell.pieces.append((content["name"], content["text"]))
                on_text(content["text"])
            elif message["msg_type"] in ("display_data", "update_display_data"):
                on_picture(message["msg_type"] != "display_data", content["data"]["image/svg+xml"])
            elif message["msg_type"] == "error":
                cell.error, cell.message = content["ename"], content["evalue"]

        self._client.execute_interactive(code, timeout=SECONDS, output_hook=take)
        return cell

    def interrupt(self) -> None:
        """Press the stop button."""
        self._manager.interrupt_kernel()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    @property
    def pid(self) -> int:
        return int(self._manager.provisioner.pid)


@contextmanager
def kernel() -> Iterator[Kernel]:
    manager, client = start_new_kernel(startup_timeout=SECONDS)
    try:
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
