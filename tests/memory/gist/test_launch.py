"""Launches of kernels: Triton chooses once for arguments of one kind, and again where it must."""

from typing import Any, NamedTuple

import pytest
import torch

import echelon.memory.gist
from tests.nn.dropout.triton_stand_in import kernel_on_cpu


class Compiled(NamedTuple):
    """What Triton returns of a launch: how to launch the same kernel straight."""

    run: Any
    function: str = "function"
    packed_metadata: str = "metadata"


class Kernel:
    def __init__(self) -> None:
        self.chosen: list[Any] = []
        self.straight: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: int) -> Compiled:
            self.chosen.append((grid, arguments, constants))
            return Compiled(lambda *arguments: self.straight.append(arguments))

        return launch


def test_a_kernel_is_chosen_once_for_arguments_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 90 + device, raising=False)
    kernel, memory = Kernel(), torch.zeros(64)
    with kernel_on_cpu(echelon.memory.gist, "launch") as module:
        launch = module.Launch(kernel, block=4)
        launch._launch(3, 0, (memory,), (2.0,))
        assert (kernel.chosen, kernel.straight) == ([((3,), (memory, 2.0), {"block": 4, "num_warps": 4})], [])
        launch._launch(5, 0, (memory,), (2.0,))
        expected = (5, 1, 1, 90, "function", "metadata", None, None, None, memory.data_ptr(), 2.0, 4)
        assert (len(kernel.chosen), kernel.straight) == (1, [expected])
        # Another number, another type, memory that is not aligned, another device: chosen again.
        launch._launch(3, 0, (memory,), (1.0,))
        launch._launch(3, 0, (memory.double(),), (2.0,))
        launch._launch(3, 0, (memory[1:],), (2.0,))
        launch._launch(3, 1, (memory,), (2.0,))
        assert (len(kernel.chosen), len(kernel.straight)) == (5, 1)
        monkeypatch.setattr(module, "_MOST", 1)
        launch._launch(3, 0, (memory,), (7.0,))
        launch._launch(3, 0, (memory,), (2.0,))
        assert (len(kernel.chosen), len(kernel.straight)) == (7, 1), "the oldest are forgotten"


def test_where_there_is_no_device_triton_is_asked_each_time() -> None:
    kernel, memory = Kernel(), torch.zeros(64)
    with kernel_on_cpu(echelon.memory.gist, "launch") as module:
        launch = module.Launch(kernel, block=4)
        for _ in range(2):
            launch(3, (memory,), 2.0)
    assert (len(kernel.chosen), kernel.straight) == (2, [])
