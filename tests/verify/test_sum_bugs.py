"""Bugs of sums break gradients on their way, and say where there is nothing to break."""

import echelon
from echelon.verify import sum_bugs
from tests.cases import Perceptron, adamw, mean_loss, vectors


def test_scaled_gradients_have_a_scaled_norm() -> None:
    model = Perceptron()
    whole = echelon.parallelize(model, "data=1", optimizer=adamw, loss=mean_loss)
    start = whole.full_state_dict()
    norm = whole.step(vectors(0)).grad_norm
    again = Perceptron()
    again.load_state_dict(start)
    broken = echelon.parallelize(again, "data=1", optimizer=adamw, loss=mean_loss, audit="off")
    assert sum_bugs._scale(broken._local.sharings, 3.0)
    assert abs(broken.step(vectors(0)).grad_norm - 3 * norm) < 1e-5 * norm


def test_one_rank_without_experts_or_ties_has_nothing_to_break() -> None:
    engine = echelon.parallelize(Perceptron(), "data=1", optimizer=adamw, loss=mean_loss)
    assert not sum_bugs.keep_experts_apart(engine)
    assert not sum_bugs.multiply_experts(engine)
    assert not sum_bugs.keep_ties_apart(engine)
    assert not sum_bugs.skip_bucket(engine)
