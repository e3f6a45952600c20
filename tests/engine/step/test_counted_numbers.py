"""Which numbers of a forward count steps, found by what one device and the plan make of the same samples."""

import torch
from torch import Tensor, nn

from echelon.collectives.agreement import RankAgreement
from echelon.engine.step.counted_numbers import CountedNumbers
from echelon.parallel.stage import LocalStages
from tests.parallel.test_stage import single


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.turn = 0, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.seen, self.turn = self.calls + 1, self.seen + len(x), (self.turn + 1) % 2
        return x


def numbers_of(model: nn.Module) -> tuple[CountedNumbers, LocalStages]:
    local = single(model)
    return CountedNumbers(model, local, RankAgreement(None, torch.device("cpu"))), local


def run_in_parts(numbers: CountedNumbers, local: LocalStages, samples: int) -> None:
    stage = local.stages[0]
    numbers.start()
    stage.start_step()
    for _ in range(2):
        stage.forward(torch.zeros(samples // 2, 1))
    numbers.stop()


def test_calls_are_held_back_and_samples_are_not() -> None:
    model = Counting()
    numbers, local = numbers_of(model)
    of_device = {"calls": 1, "seen": 4, "turn": 1}
    numbers.learn(of_device)
    assert not numbers.goes_on(of_device)
    run_in_parts(numbers, local, 4)
    assert numbers.compare(of_device) == set(), "samples were held back until now"
    assert [key for _, key in local.stages[0].counted] == ["calls", "turn"]
    assert numbers.goes_on(of_device)
    model.seen = 0
    numbers.learn({"calls": 1, "seen": 4, "turn": -1})
    run_in_parts(numbers, local, 4)
    assert numbers.compare({"calls": 1, "seen": 4, "turn": -1}) == set()
    assert (model.calls, model.seen, model.turn) == (2, 4, 0)


def test_what_a_plan_moves_otherwise_is_told() -> None:
    model = Counting()
    numbers, local = numbers_of(model)
    of_device = {"calls": 1, "seen": 8, "turn": 1}  # of two replicas
    for found in (set(), {"seen"}):
        model.turn = 0
        numbers.learn(of_device)
        run_in_parts(numbers, local, 4)
        assert numbers.compare(of_device) == found


def test_a_number_that_has_gone_is_no_error() -> None:
    model = Counting()
    numbers, local = numbers_of(model)
    numbers.learn({"calls": 1})
    del model.calls
    model.register_buffer("calls", torch.zeros(()))
    run_in_parts(numbers, local, 4)
    numbers.share()
    assert numbers.compare({}) == {"seen"}
