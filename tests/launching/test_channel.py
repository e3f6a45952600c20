from collections import defaultdict

from echelon.launching import Ranks, is_launched_rank, tell

from . import tasks


def test_outside_a_rank_nothing_is_told() -> None:
    assert not is_launched_rank()
    tell("nobody listens")


def test_messages_arrive_in_order_while_the_run_waits() -> None:
    heard: dict[int, list[tuple[int, float]]] = defaultdict(list)
    with Ranks(2) as ranks:
        ranks.run(
            tasks.count_aloud, 50, on_message=lambda rank, said: heard[rank].append((said[0], said[1].item()))
        )
    assert heard == {rank: [(step, float(step)) for step in range(50)] for rank in range(2)}


def test_messages_without_a_listener_are_dropped() -> None:
    with Ranks(1) as ranks:
        assert ranks.run(tasks.count_aloud, 3) == [3]


def test_threads_of_a_rank_do_not_mix_their_messages() -> None:
    heard = []
    with Ranks(1) as ranks:
        ranks.run(tasks.speak_from_threads, 4, 50, on_message=lambda *said: heard.append(said))
    assert sorted(heard) == [(0, (thread, word)) for thread in range(4) for word in range(50)]


def test_a_forked_data_worker_does_not_speak_for_its_rank() -> None:
    heard = []
    with Ranks(1) as ranks:
        said = ranks.run(tasks.speak_from_a_fork, on_message=lambda *said: heard.append(said))
    assert said == [(0, True)]
    assert heard == []
