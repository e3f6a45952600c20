from collections import defaultdict

import pytest

from echelon.launching import RankFailed, Ranks, is_launched_rank, send_message
from tests.launching import tasks


def test_outside_a_rank_nothing_is_sent() -> None:
    assert not is_launched_rank()
    send_message("nobody listens")


def test_messages_arrive_in_order_while_the_run_waits() -> None:
    received: dict[int, list[tuple[int, float]]] = defaultdict(list)
    with Ranks(2) as ranks:
        ranks.run(
            tasks.send_counts,
            50,
            on_message=lambda rank, content: received[rank].append((content[0], content[1].item())),
        )
    assert received == {rank: [(step, float(step)) for step in range(50)] for rank in range(2)}


def test_messages_without_a_listener_are_dropped() -> None:
    with Ranks(1) as ranks:
        assert ranks.run(tasks.send_counts, 3) == [3]


def test_what_a_rank_says_after_another_has_failed_is_heard() -> None:
    received = []
    with Ranks(2) as ranks, pytest.raises(RankFailed, match="rank 1"):
        ranks.run(tasks.fail_after_a_message, (0.1, 0.0), on_message=lambda *event: received.append(event))
    assert sorted(received) == [(0, 0), (1, 1)]


def test_threads_of_a_rank_do_not_mix_their_messages() -> None:
    received = []
    with Ranks(1) as ranks:
        ranks.run(tasks.send_from_threads, 4, 50, on_message=lambda *event: received.append(event))
    assert sorted(received) == [(0, (thread, word)) for thread in range(4) for word in range(50)]


def test_a_forked_data_worker_does_not_send_in_the_name_of_its_rank() -> None:
    received = []
    with Ranks(1) as ranks:
        results = ranks.run(tasks.send_from_a_fork, on_message=lambda *event: received.append(event))
    assert results == [(0, True)]
    assert received == []
