import pickle

import pytest

from echelon.launching import RankFailed, RankHung


@pytest.mark.parametrize("kind", [RankFailed, RankHung])
def test_the_text_names_rank_reason_others_and_traceback(kind: type[RankFailed]) -> None:
    error = kind(2, "raised ValueError: no", "Traceback …\nValueError: no\n", ["rank 0 was ended"])
    assert str(error) == "rank 2 raised ValueError: no\n  rank 0 was ended\n\nTraceback …\nValueError: no"


def test_it_survives_pickle() -> None:
    error = RankHung(1, "hangs", "stacks", ["rank 0 waits"])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is RankHung
    assert (copy.rank, copy.reason, copy.traceback, copy.others) == (1, "hangs", "stacks", ("rank 0 waits",))
