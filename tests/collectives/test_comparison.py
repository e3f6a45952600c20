"""debug=true: what ranks call is compared before data moves, over Gloo and over shared memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.collectives import (
    Group,
    Ledger,
    MismatchError,
    TorchGroup,
    about_content,
    group_over,
    ring_all_reduce,
)
from echelon.collectives.comparison import Call
from echelon.collectives.mesh import compare_calls
from echelon.collectives.process_groups import new_host_group
from echelon.launching import Ranks

Warm = Callable[[int], Ranks]
ALL = (0, 1, 2)


def compared(kind: str) -> Group:
    """A new group of all ranks that compares its calls."""
    process_group = new_host_group(range(dist.get_world_size()))
    torch_group = TorchGroup("data", process_group, Ledger())
    group = torch_group if kind == "gloo" else group_over("data", process_group, Ledger())
    compare_calls(group)
    assert group.comparison is not None
    return group


def all_operations(kind: str) -> list[torch.Tensor]:
    """The results of every operation, with and without a comparison."""
    group = compared(kind)
    results = _do_all(group)
    for _ in range(3):  # keys of earlier calls are not taken for later ones
        _do_all(group)
    group.comparison = None
    expected = _do_all(group)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    group.close()
    return results


def _do_all(group: Group) -> list[torch.Tensor]:
    size, rank = group.size, group.rank
    part = torch.arange(4.0) + rank
    whole = torch.arange(4.0 * size) * (rank + 1)
    all_reduced, ringed, broadcast = whole.clone(), whole.clone(), part.clone()
    scattered, gathered, exchanged = torch.zeros(4), torch.zeros(4 * size), torch.zeros(size + rank * 2)
    handle = group.all_reduce(all_reduced, wait=False)
    group.broadcast(broadcast, 1)
    handle.wait()
    ring_all_reduce(group, ringed)
    group.reduce_scatter(scattered, whole, "max")
    group.all_gather(gathered, part)
    # Rank r sends one row to every rank, and to itself so many more.
    own = [1 + (2 * rank if each == rank else 0) for each in range(size)]
    group.all_to_all(exchanged, torch.arange(1.0 * sum(own)), own, own)
    reduced = part.clone()
    group.reduce(reduced, 0)
    rooted = torch.zeros(4 * size)
    group.gather(part, rooted if rank == 0 else None)
    group.scatter(broadcast, whole if rank == 0 else None)
    group.all_reduce(torch.zeros(0))
    group.barrier()
    first = [reduced] if rank == 0 else []
    return [all_reduced, ringed, broadcast, scattered, gathered, exchanged, rooted, *first]


@pytest.mark.parametrize("kind", ["gloo", "shared"])
def test_equal_calls_do_what_they_did(warm_ranks: Warm, kind: str) -> None:
    results = warm_ranks(3).run(all_operations, kind)
    assert torch.equal(results[0][0], torch.arange(12.0) * 6)


def messages_in_any_order(kind: str) -> list[float]:
    """Posted ahead, in both directions, and waited for from the last to the first."""
    group = compared(kind)
    peer = 1 - group.rank
    incoming = [torch.zeros(1) for _ in range(3)]
    receives = [group.recv(each, peer, wait=False) for each in incoming]
    sends = [group.send(torch.tensor([10.0 * group.rank + number]), peer, wait=False) for number in range(3)]
    for handle in [*reversed(receives), *sends]:
        handle.wait()
    group.close()
    return [each.item() for each in incoming]


@pytest.mark.parametrize("kind", ["gloo", "shared"])
def test_messages_keep_their_order(warm_ranks: Warm, kind: str) -> None:
    assert warm_ranks(2).run(messages_in_any_order, kind) == [[10.0, 11.0, 12.0], [0.0, 1.0, 2.0]]


def send_to_each_other(kind: str) -> float:
    """Both wait for what they have sent before they wait for what they receive."""
    group = compared(kind)
    peer, incoming = 1 - group.rank, torch.zeros(1)
    receive = group.recv(incoming, peer, wait=False)
    group.send(torch.tensor([1.0 + group.rank]), peer)
    receive.wait()
    group.close()
    return incoming.item()


def meet_in_another_group(kind: str) -> float:
    """One waits for what it has sent while the other, whose receive is posted, waits for all ranks."""
    messages, everybody = compared(kind), compared(kind)
    incoming = torch.zeros(1)
    if messages.rank == 0:
        messages.send(torch.tensor([2.0]), 1)
        everybody.barrier()
    else:
        receive = messages.recv(incoming, 0, wait=False)
        everybody.barrier()
        receive.wait()
    for group in (messages, everybody):
        group.close()
    return incoming.item()


@pytest.mark.parametrize("kind", ["gloo", "shared"])
def test_posted_receives_begin_whatever_their_rank_waits_for(warm_ranks: Warm, kind: str) -> None:
    assert warm_ranks(2).run(send_to_each_other, kind) == [2.0, 1.0]
    assert warm_ranks(2).run(meet_in_another_group, kind) == [0.0, 2.0]


def is_done_before_it_is_received() -> list[bool]:
    """Shared memory takes a short message at once; whoever lets go of it then would wait for its receiver."""
    group = compared("shared")
    if group.rank == 1:
        dist.barrier()
        group.recv(torch.zeros(1), 0)
        dist.barrier()
        return []
    handle = group.send(torch.ones(1), 1, wait=False)
    handle._work._work.wait()  # type: ignore[union-attr]
    early = handle.done()
    dist.barrier()
    dist.barrier()
    late = handle.done()
    handle.wait()
    return [early, late]


def test_a_message_is_not_done_before_its_receiver_has_called(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(is_done_before_it_is_received)[0] == [False, True]


def error_of(kind: str, number: int) -> str:
    group = compared(kind)
    try:
        MISTAKES[number](group)
    except MismatchError as error:
        group.close(failed=True)
        return str(error)
    return ""


def _different_operations(group: Group) -> None:
    if group.rank == 1:
        group.all_reduce(torch.ones(4096))
    else:
        group.broadcast(torch.ones(8), 0)


def _different_sizes(group: Group) -> None:
    group.all_reduce(torch.ones(4 + group.rank // 2))


def _different_types(group: Group) -> None:
    group.all_gather(torch.ones(6, dtype=_type(group)), torch.ones(2, dtype=_type(group)), wait=False)


def _type(group: Group) -> torch.dtype:
    return torch.float32 if group.rank else torch.float64


def _different_reductions(group: Group) -> None:
    group.all_reduce(torch.ones(4), "max" if group.rank == 1 else "sum")


def _nothing_on_one_rank(group: Group) -> None:
    group.all_reduce(torch.ones(4 if group.rank else 0))


def _different_rows(group: Group) -> None:
    rows = [1, 1, 2] if group.rank == 0 else [1, 1, 1]
    group.all_to_all(torch.ones(3, 5), torch.ones(sum(rows), 5), None, rows)


def _different_rows_wide(group: Group) -> None:
    width = 5 + (group.rank == 2)
    group.all_to_all(torch.ones(3, width), torch.ones(3, width))


MISTAKES: list[Callable[[Group], Any]] = [
    _different_operations,
    _different_sizes,
    _different_types,
    _different_reductions,
    _nothing_on_one_rank,
    _different_rows,
    _different_rows_wide,
]
SIDES = [
    ("rank 0 calls broadcast (from rank 0) of 8 float32", "rank 1 calls all_reduce (sum) of 4,096 float32"),
    ("rank 0 calls all_reduce (sum) of 4 float32", "rank 2 calls all_reduce (sum) of 5 float32"),
    ("rank 0 calls all_gather of 6 float64", "rank 1 calls all_gather of 6 float32"),
    ("rank 0 calls all_reduce (sum) of 4 float32", "rank 1 calls all_reduce (max) of 4 float32"),
    ("rank 0 calls all_reduce (sum) of 0 float32", "rank 1 calls all_reduce (sum) of 4 float32"),
    (
        "rank 0 calls all_to_all of 5 float32 a row, [1, 1, 2] rows to the ranks and [1, 1, 1] from them,",
        "rank 2 calls all_to_all of 5 float32 a row, [1, 1, 1] rows to the ranks and [1, 1, 1] from them,",
    ),
    ("rank 0 calls all_to_all of 5 float32 a row", "rank 2 calls all_to_all of 6 float32 a row"),
]


@pytest.mark.parametrize("kind", ["gloo", "shared"])
def test_different_calls_are_one_error_on_every_rank(warm_ranks: Warm, kind: str) -> None:
    for number, sides in enumerate(SIDES):
        errors = warm_ranks(3).run(error_of, kind, number)
        assert len(set(errors)) == 1, "the same on all ranks"
        assert all(side in errors[0] for side in sides), errors[0]
        assert errors[0].endswith(
            "along data: all ranks of a group must call the same operations in the same order, with equal "
            "sizes and types"
        )


def message_error(kind: str, sent: torch.Tensor, received: torch.Tensor, microbatch: int) -> str:
    group = compared(kind)
    try:
        if group.rank == 0:
            with about_content("activation of microbatch 0 for stage 1"):
                group.send(sent, 1, wait=False).wait()
        elif group.rank == 1:
            with about_content(f"activation of microbatch {microbatch} for stage 1"):
                handle = group.recv(received, 0, wait=False)
            handle.wait()
    except MismatchError as error:
        assert not received.any(), "nothing has moved"
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["gloo", "shared"])
@pytest.mark.parametrize(
    ("sent", "received", "microbatch", "said"),
    [
        (torch.ones(4), torch.zeros(3), 0, "recv of 3 float32"),
        (torch.ones(2), torch.zeros(3), 0, "recv of 3 float32"),
        (torch.ones(4), torch.zeros(4, dtype=torch.int32), 0, "recv of 4 int32"),
        (torch.ones(4), torch.zeros(4), 1, "recv of 4 float32, activation of microbatch 1 for stage 1,"),
    ],
)
def test_messages_are_compared_on_both_sides(
    warm_ranks: Warm, kind: str, sent: torch.Tensor, received: torch.Tensor, microbatch: int, said: str
) -> None:
    errors = warm_ranks(2).run(message_error, kind, sent, received, microbatch)
    for error in errors:
        assert f"rank 1 calls {said}" in error
        content = "activation of microbatch 0 for stage 1"
        assert f"rank 0 calls send of {len(sent)} float32, {content}, along data" in error


def mismatch_of_a_posted_receive() -> str:
    """The end that is called last finds the difference, and does not begin."""
    group = compared("gloo")
    received = torch.zeros(3)
    receive = group.recv(received, 0, wait=False) if group.rank == 1 else None
    dist.barrier()
    last: Callable[[], Any] = partial(group.send, torch.ones(4), 1, wait=False)
    with pytest.raises(MismatchError) as caught:
        (last if receive is None else receive.wait)()
    dist.barrier()  # Gloo would have ended the receiver by now
    assert not received.any(), "nothing has moved"
    group.close(failed=True)
    return str(caught.value)


def test_a_wrong_message_is_not_sent_to_a_receive_that_is_posted(warm_ranks: Warm) -> None:
    for error in warm_ranks(2).run(mismatch_of_a_posted_receive):
        assert "rank 0 calls send of 4 float32 along data" in error
        assert "rank 1 calls recv of 3 float32 along data" in error


def receive_nothing() -> str:
    group = compared("gloo")
    error = ""
    if group.rank == 1:
        group.recv(torch.zeros(0), 0)
        dist.barrier()
    else:
        dist.barrier()
        with pytest.raises(MismatchError) as caught:
            group.send(torch.ones(4), 1)
        error = str(caught.value)
    dist.barrier()  # a receiver that is gone would be another error
    group.close(failed=True)
    return error


def test_the_sender_learns_of_a_receiver_that_expects_nothing(warm_ranks: Warm) -> None:
    assert "rank 1 calls recv of 0 float32" in warm_ranks(2).run(receive_nothing)[0]


def test_a_call_says_where_its_rank_is() -> None:
    call = Call("barrier", "tensor", "", 0, place="in step 3, at REDUCE of stage 0")
    assert str(call) == "barrier along tensor (in step 3, at REDUCE of stage 0)"
    assert Call.unpack(call.pack().encode()) == call


# What TORCH_DISTRIBUTED_DEBUG=DETAIL does not find, and debug=true does.


def found_by_torch(mistake: Callable[[Group], Any]) -> str:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = TorchGroup("data", new_host_group(range(dist.get_world_size())), Ledger())
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    dist.barrier()  # a rank that closes its group while another one still connects is another error
    try:
        mistake(group)
    except RuntimeError as error:
        return str(error)
    finally:
        group.close(failed=True)
    return ""


def _shorter_message(group: Group) -> None:
    if group.rank == 0:
        group.send(torch.ones(2), 1)
    elif group.rank == 1:
        group.recv(torch.zeros(3), 0)


def test_torch_finds_other_sizes_and_neither_other_reductions_nor_messages(warm_ranks: Warm) -> None:
    assert all("mismatch" in each for each in warm_ranks(3).run(found_by_torch, _different_sizes))
    assert warm_ranks(3).run(found_by_torch, _different_reductions) == [""] * 3
    assert warm_ranks(3).run(found_by_torch, _shorter_message) == [""] * 3
