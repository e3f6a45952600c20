"""What travels between ranks with different experts, against the formulas."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch

import echelon
from echelon.launching import Ranks
from echelon.models import cross_entropy
from tests.cases import adamw
from tests.nn.experts.models import EXPERTS, SEQUENCE, WIDTH, make_model
from tests.parallel.expert.models import plain_gate, tokens

Warm = Callable[[int], Ranks]

LAYERS, SAMPLES, TOP_K = 2, 4, 2


def moves(plan: str) -> tuple[Counter[tuple[str, str]], int, int]:
    """How many messages of each subject; the bytes of rows that left, and came, counted with one's own."""
    torch.manual_seed(0)
    engine = echelon.parallelize(
        make_model(plain_gate, LAYERS), plan, optimizer=adamw, loss=cross_entropy, audit="off"
    )
    engine.step(engine.local(tokens(0, 2 * SAMPLES)))
    along = [move for move in engine.ledger.moves if move.axis == "expert"]
    payload = sum(move.traffic.payload for move in along if move.subject == "experts")
    counts = sum(move.traffic.payload for move in along if move.subject == "expert counts")
    return Counter((move.subject, move.operation) for move in along), payload, counts


@pytest.mark.parametrize(("microbatches", "recompute"), [(1, "none"), (2, "none"), (1, "full")])
def test_four_all_to_alls_per_layer_and_microbatch(
    warm_ranks: Warm, microbatches: int, recompute: str
) -> None:
    """And one of counts; a forward that runs again sends its rows again, and no counts."""
    plan = f"data=2 expert=2 microbatches={microbatches} recompute={recompute}"
    found = warm_ranks(2).run(moves, plan)
    times = 6 if recompute == "full" else 4
    for messages, _, counts in found:
        assert messages == {
            ("experts", "all_to_all"): times * LAYERS * microbatches,
            ("expert counts", "all_to_all"): LAYERS * microbatches,
        }
        assert counts == LAYERS * microbatches * EXPERTS * 8
    slots = 2 * SAMPLES * SEQUENCE * TOP_K
    assert sum(payload for _, payload, _ in found) == times * LAYERS * slots * WIDTH * 4
