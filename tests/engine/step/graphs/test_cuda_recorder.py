"""What needs no device of the recorder; tests/gpu/test_graphs.py has the rest."""

import warnings

import pytest
import torch

from echelon.engine.step.graphs import cuda_recorder
from echelon.engine.step.graphs.cuda_recorder import CudaRecorder
from echelon.update.numbers import Tally


def test_waits_are_noted_and_other_warnings_given(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def run() -> int:
        warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("the user's own", stacklevel=1)
        return 3

    with pytest.warns(UserWarning, match="own") as caught:
        assert CudaRecorder().waits(run) == (3, True)
    assert [str(each.message) for each in caught] == ["the user's own"]
    assert modes == ["warn", 0]
    assert CudaRecorder().waits(lambda: 4) == (4, False)


def test_a_failed_recording_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []

    class Graph:
        def __init__(self, *_: object, **__: object) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Graph)
    monkeypatch.setattr(cuda_recorder, "_end_failed_capture", lambda: ended.append(True))

    def fail() -> Tally:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        CudaRecorder().record(fail, [], lambda _: None)
    assert ended == [True]
    parameters = [torch.nn.Parameter(torch.ones(1))]
    outputs = CudaRecorder().record(lambda: Tally(torch.ones(3)), parameters, lambda _: None).outputs
    assert outputs.tally.row.tolist() == [1.0, 1.0, 1.0]
    assert outputs.gradients == [None]
    assert ended == [True]
