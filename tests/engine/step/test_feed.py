"""Batches to the device. What pinned memory does is tested on a GPU: tests/gpu/test_no_sync.py."""

import pytest
import torch
from torch import Tensor

from echelon.engine.step import feed
from echelon.engine.step.feed import Upload, to_device

CPU = torch.device("cpu")


def test_structures_keep_their_form_and_what_is_no_tensor() -> None:
    inputs = {"tokens": torch.arange(3), "name": "kept", "more": [torch.ones(2)]}
    moved = to_device(inputs, CPU)
    assert moved["tokens"] is inputs["tokens"]
    assert moved["name"] == "kept"
    assert torch.equal(moved["more"][0], torch.ones(2))


class Copied(Tensor):
    """A tensor that records how it was copied."""

    calls: list[tuple[object, ...]] = []  # noqa: RUF012 (each test sets its own)

    def is_pinned(self, *_: object) -> bool:
        return ("pinned",) in self.calls

    def contiguous(self, *_: object) -> "Copied":  # type: ignore[override]
        packed = super().contiguous()
        if packed is not self:
            packed.calls = []
        return packed  # type: ignore[return-value]

    def pin_memory(self, *_: object) -> "Copied":
        self.calls.append(("pinned",))
        return self

    def to(self, *args: object, **kwargs: object) -> "Copied":  # type: ignore[override]
        self.calls.append((*args, kwargs))
        return self


@pytest.mark.parametrize("pinned", [False, True])
def test_a_batch_goes_to_a_device_from_pinned_memory_and_nobody_waits(pinned: bool) -> None:
    leaf = torch.ones(2).as_subclass(Copied)
    leaf.calls = [("pinned",)] if pinned else []
    to_device((leaf, 3), torch.device("cuda", 0))
    assert leaf.calls == [("pinned",), (torch.device("cuda", 0), {"non_blocking": True})]


def test_memory_with_gaps_is_packed_before_it_is_pinned() -> None:
    tokens = torch.arange(6).view(2, 3).as_subclass(Copied)
    strided = tokens[:, :-1]
    strided.calls = [("pinned",)]
    moved = to_device(strided, torch.device("cuda", 0))
    assert moved.is_contiguous()
    assert torch.equal(moved.as_subclass(Tensor), torch.tensor([[0, 1], [3, 4]]))
    assert strided.calls == [("pinned",)], "it was not copied from the user's memory"


def test_only_memory_of_the_user_s_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self) -> None:
            self.calls: list[str] = []
            events.append(self)

        def record(self) -> None:
            self.calls.append("record")

        def synchronize(self) -> None:
            self.calls.append("synchronize")

    events: list[Event] = []
    monkeypatch.setattr(feed.torch.cuda, "Event", Event)
    leaf = torch.ones(2).as_subclass(Copied)
    for leaf.calls, device in (([], "cuda"), ([("pinned",)], "cpu"), ([("pinned",)], "cuda")):
        Upload((leaf, torch.ones(2)), torch.device(device)).wait()
    assert [event.calls for event in events] == [["record", "synchronize"]]
