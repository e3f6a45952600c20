from echelon.async_training.messages import pack_log, unpack_log
from echelon.runtime import Push


def test_a_log_survives_the_journey() -> None:
    log = [Push(0, 0, 0, 1), Push(3, 7, 5, 9)]
    assert unpack_log(pack_log(log)) == log
    assert unpack_log(pack_log([])) == []
