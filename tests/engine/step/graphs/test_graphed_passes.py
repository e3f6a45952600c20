"""Which steps are recorded, compared and replayed, and that they train what they would train without."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.engine import updates
from echelon.engine.step.graphs.cuda_recorder import Recorded
from echelon.engine.step.graphs.graphed_passes import distance
from echelon.parallel.observer import StepObserver
from echelon.update.numbers import Tally
from tests.engine.step.graphs.fake_recorder import (
    RECORDED_AFTER,
    FakeRecorder,
    batch,
    engine_of,
    network,
    recorded,
    train,
)


def counted(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    losses = nn.functional.cross_entropy(output, targets, reduction="none")
    return losses.sum(), torch.tensor(len(targets))


@pytest.mark.parametrize("loss", [nn.functional.cross_entropy, counted])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_replays_train_what_passes_as_they_are_train(
    precision: str, microbatches: int, loss: Callable[..., Any]
) -> None:
    plan = f"precision={precision} microbatches={microbatches}"
    results = []
    for words in ("", " graphs=true"):
        model = network(normalises=microbatches == 1)
        engine = engine_of(model, plan + words, loss=loss, clip=0.5)
        replays = recorded(engine)[1] if words else FakeRecorder()
        losses = train(engine, 20)
        results.append((losses, engine.full_state_dict()))
        assert replays.num_replays == (20 - RECORDED_AFTER + 2 if words else 0)
        engine.close()
    (losses, weights), (other_losses, other_weights) = results
    assert losses == other_losses
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_a_replay_takes_the_values_of_its_own_batch() -> None:
    engine = engine_of(network())
    _, recorder = recorded(engine)
    losses = train(engine, RECORDED_AFTER + 5)
    assert recorder.num_replays == 2 + 5
    assert len(set(losses)) == len(losses)


def test_other_forms_of_batches_have_recordings_of_their_own() -> None:
    engine = engine_of(network())
    graphs, recorder = recorded(engine)
    for samples in (8, 6):
        for step in range(RECORDED_AFTER + 1):
            engine.step(batch(step, samples))
    assert len(recorder.recordings) == 2
    assert "2 forms" in graphs.describe()
    with pytest.warns(UserWarning, match="batches have more than 8 forms"):
        [train(engine, 1, samples) for samples in range(9, 15)]
    assert graphs.reason == "batches have more than 8 forms"


def test_auto_records_where_the_host_is_slower_and_the_replay_faster() -> None:
    for recorder, num_recordings, says in (
        (FakeRecorder(), 1, "replayed"),
        (FakeRecorder(host=1e-4), 0, "slower than the host"),
        (FakeRecorder(host=2.0, device=1.0), 0, "slower than the host"),
        (FakeRecorder(device=2e-3, replay=1.9e-3), 1, "slower than the host"),
        (FakeRecorder(device=None), 0, "no passes are recorded yet"),
        (FakeRecorder(host=5e-4, update=1e-3, replay=1e-3), 1, "replayed"),  # the device waits for updates
        (FakeRecorder(host=1e-4, update=1e-3, replay=1e-3), 1, "slower than the host"),  # with replays too
    ):
        engine = engine_of(network(), "graphs=auto precision=fp64")
        graphs, _ = recorded(engine, recorder)
        train(engine, RECORDED_AFTER + 3)
        assert len(recorder.recordings) == num_recordings
        assert says in graphs.describe()
        engine.close()


class Branching(nn.Module):
    """Does what a test lets it do beside its product."""

    def __init__(self, aside: Callable[["Branching", Tensor], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.aside = nn.Linear(6, 3), aside
        self.calls = 0
        self.history: list[int] = []
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.aside(self, x)
        return self.linear(x) * self.scale


def count(module: Branching, _: Tensor) -> None:
    module.calls += 1


def remember(module: Branching, x: Tensor) -> None:
    module.history.append(len(x))


def keep(module: Branching, x: Tensor) -> None:
    module.last = x


def draw(_: Branching, __: Tensor) -> None:
    random.random()


def nothing(_: Branching, __: Tensor) -> None: ...


@pytest.mark.parametrize(
    ("aside", "reason"),
    [
        (count, "the forward changes a Branching"),
        (remember, "the forward changes history of a Branching"),
        (keep, "the forward changes a Branching"),
        (draw, "draw"),
    ],
)
@pytest.mark.filterwarnings("ignore:random.random")
def test_a_model_with_state_in_python_runs_as_it_is(
    aside: Callable[[Branching, Tensor], None], reason: str
) -> None:
    engine = engine_of(Branching(aside))
    graphs, recorder = recorded(engine)
    with pytest.warns(UserWarning, match="graphs=true: passes run as they are, since"):
        train(engine, RECORDED_AFTER + 1)
    assert recorder.recordings == []
    assert reason in str(graphs.reason)
    assert str(graphs.reason) in graphs.describe()


def check_replays(make: Callable[[], nn.Module], plan: str) -> None:
    """Replays train the same bits as passes that run as they are."""
    results = []
    for words in ("", " graphs=true"):
        torch.manual_seed(0)
        engine = engine_of(make(), plan + words)
        recorder = recorded(engine)[1] if words else FakeRecorder()
        losses = train(engine, RECORDED_AFTER + 5)
        results.append((losses, engine.full_state_dict()))
        assert recorder.num_replays == (2 + 5 if words else 0)
    (losses, weights), (other_losses, other_weights) = results
    assert losses == other_losses
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


class Drawing(nn.Module):
    """Draws by functions of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(x + 0.1 * torch.randn_like(x)), 0.3, self.training)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(
    "make",
    [
        Drawing,
        lambda: nn.Sequential(network(normalises=False), nn.Dropout(0.5)),
        lambda: nn.Sequential(nn.Linear(6, 3), nn.AlphaDropout(0.2)),
    ],
)
def test_a_replay_draws_the_numbers_of_its_own_step(make: Callable[[], nn.Module], microbatches: int) -> None:
    check_replays(make, f"precision=fp64 microbatches={microbatches}")


@pytest.mark.slow
def test_dropout_of_compiled_layers_runs_as_it_is() -> None:
    engine = engine_of(nn.Sequential(network(), nn.Dropout(0.5)), "graphs=true precision=fp64 compile=true")
    recorded(engine)
    with pytest.warns(UserWarning, match="dropout in compiled layers reads the number of its step"):
        train(engine, RECORDED_AFTER)


class Beginning(Drawing):
    """Draws where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.is_noisy = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.is_noisy else self.linear(x)


def test_numbers_that_a_model_begins_to_draw_are_those_of_passes_as_they_are() -> None:
    for first in range(1, RECORDED_AFTER + 2):
        results = []
        for words in ("", " graphs=true"):
            torch.manual_seed(0)
            model = Beginning()
            engine = engine_of(model, f"precision=fp64{words}")
            if words:
                recorded(engine)
            torch.manual_seed(1)
            losses = []
            for step in range(RECORDED_AFTER + 6):
                model.is_noisy = step >= first
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of a first draw that comes late
                    losses.append(engine.step(batch(step)).loss)
            results.append(losses)
        assert results[0] == results[1], first


class Seeding(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            torch.manual_seed(7)
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:.*drawn")
def test_draws_that_an_evaluation_leaves_to_torch_end_the_recordings() -> None:
    torch.manual_seed(0)
    engine = engine_of(Seeding())
    graphs, recorder = recorded(engine)
    train(engine, RECORDED_AFTER + 2)
    assert graphs.reason is None
    replays = recorder.num_replays
    engine.evaluate(batch(0))
    with pytest.warns(UserWarning, match="passes run as they are, since passes draw random numbers"):
        train(engine, 2)
    assert recorder.num_replays == replays


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + torch.poisson(torch.ones_like(x)))


def test_numbers_that_are_drawn_on_the_host_are_no_error() -> None:
    """On a device, their key would make the host wait, which a recording does not."""
    plain, engine = engine_of(Counting(), "precision=fp64"), engine_of(Counting())
    engine.module.load_state_dict(plain.module.state_dict())
    recorder = FakeRecorder()
    recorder.does_wait = True
    recorded(engine, recorder)
    with pytest.warns(UserWarning, match="waits for the device"):
        losses = train(engine, RECORDED_AFTER + 2)
    assert losses == train(plain, RECORDED_AFTER + 2)


@pytest.mark.parametrize("compress", ["gist", "gist-fp16", "gist-fp8"])
def test_what_is_kept_in_fewer_bits_is_recorded(compress: str) -> None:
    check_replays(
        lambda: nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3)),
        f"precision=fp32 compress={compress}",
    )


def test_dropout_that_drops_nothing_is_recorded() -> None:
    engine = engine_of(nn.Sequential(network(), nn.Dropout(0.0)))
    _, recorder = recorded(engine)
    train(engine, RECORDED_AFTER + 1)
    assert recorder.num_replays == 3


@pytest.mark.parametrize(
    ("does_wait", "is_roomy", "error", "reason"),
    [
        (True, True, None, "waits for the device"),
        (False, False, None, "no memory for a recording"),
        (False, True, RuntimeError("not permitted\nmore"), "cannot be recorded: not permitted$"),
    ],
)
def test_what_cannot_be_recorded_runs_as_it_is(
    does_wait: bool, is_roomy: bool, error: Exception | None, reason: str
) -> None:
    plain, engine = engine_of(network(), "precision=fp64"), engine_of(network())
    recorder = FakeRecorder()
    recorder.does_wait, recorder.is_roomy, recorder.error = does_wait, is_roomy, error
    recorded(engine, recorder)
    with pytest.warns(UserWarning, match=reason):
        losses = train(engine, RECORDED_AFTER + 2)
    assert losses == train(plain, RECORDED_AFTER + 2)


def change_attribute(engine: echelon.Engine) -> None:
    engine.module.scale = 0.5  # type: ignore[assignment]


def change_mode(engine: echelon.Engine) -> None:
    engine.module.linear.eval()  # type: ignore[operator, union-attr]


def change_memory(engine: echelon.Engine) -> None:
    for parameter in engine.module.parameters():
        parameter.data = parameter.data.clone()


def freeze(engine: echelon.Engine) -> None:
    engine.module.linear.bias.requires_grad_(False)  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("change", [change_attribute, change_mode, change_memory, freeze])
def test_a_change_between_steps_is_seen(change: Callable[[echelon.Engine], None]) -> None:
    losses = []
    for words in ("", "graphs=true "):
        engine = engine_of(Branching(nothing), f"{words}precision=fp64")
        recorder = recorded(engine)[1] if words else FakeRecorder()
        of_engine = train(engine, RECORDED_AFTER + 2)
        before = recorder.num_replays
        change(engine)
        of_engine += train(engine, 4)
        assert recorder.num_replays == before
        of_engine += train(engine, RECORDED_AFTER)
        assert not words or len(recorder.recordings) == 2
        losses.append(of_engine)
        engine.close()
    assert losses[0] == losses[1]


def test_weights_that_are_written_by_hand_are_those_of_the_next_replay() -> None:
    losses = []
    for words in ("", "graphs=true "):
        engine = engine_of(network(), f"{words}precision=fp64")
        recorder = recorded(engine)[1] if words else FakeRecorder()
        of_engine = train(engine, RECORDED_AFTER + 1)
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(0.5)
        before = recorder.num_replays
        of_engine += train(engine, 2)
        assert not words or recorder.num_replays == before + 2
        losses.append(of_engine)
    assert losses[0] == losses[1]


def test_what_changes_again_and_again_is_named() -> None:
    engine = engine_of(Branching(nothing))
    _, recorder = recorded(engine)

    def change_and_train(number: int) -> None:
        engine.module.scale = 1.0 + number  # type: ignore[assignment]
        train(engine, 10)

    with pytest.warns(UserWarning, match="a Branching changes between steps"):
        [change_and_train(number) for number in range(6)]
    assert len(recorder.recordings) == 5


def test_a_hook_that_comes_later_is_called() -> None:
    engine = engine_of(Branching(nothing))
    recorded(engine)
    train(engine, RECORDED_AFTER + 1)
    seen: list[int] = []
    engine.module.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(UserWarning, match="a hook of a Branching would run in no replay"):
        train(engine, RECORDED_AFTER)
    assert len(seen) == RECORDED_AFTER


class Watching(StepObserver):
    def __init__(self) -> None:
        self.losses = 0

    def after_loss(self, loss: object) -> None:  # noqa: ARG002
        self.losses += 1


def test_observers_see_each_pass() -> None:
    engine = engine_of(network())
    _, recorder = recorded(engine)
    train(engine, RECORDED_AFTER + 1)
    observer, before = Watching(), recorder.num_replays
    engine.observe(observer)
    engine.step(batch(0))
    assert (observer.losses, recorder.num_replays) == (1, before)


def test_a_trace_has_the_passes_of_its_steps(tmp_path: Any) -> None:
    engine = engine_of(network())
    _, recorder = recorded(engine)
    train(engine, RECORDED_AFTER + 1)
    before = recorder.num_replays
    engine.trace(tmp_path / "trace.json")
    train(engine, 3)
    assert recorder.num_replays == before
    assert "B0" in (tmp_path / "trace.json").read_text()
    engine.step(batch(0))
    assert recorder.num_replays == before + 1
    assert {span.instruction.op.value for span in engine.spans} & {"F", "B"} == set()


def test_gradients_of_several_batches_add_up() -> None:
    results = []
    for words in ("", "graphs=true "):
        engine = engine_of(network(), f"{words}precision=fp64")
        if words:
            recorded(engine)
        for step in range(RECORDED_AFTER + 4):
            engine.forward_backward(batch(step))
            engine.forward_backward(batch(100 + step))
            engine.update()
        results.append(engine.full_state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


# Numbers of updates: on a device they stay there, and a recording has them too.


@pytest.fixture
def late_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device, numbers of updates are not read in a step."""
    monkeypatch.setattr(updates, "reads_late", lambda _: True)


def infinite(output: Tensor, targets: Tensor) -> Tensor:
    """In some steps."""
    scale = torch.where((targets[0] == 0) & (targets[-1] == 2), torch.inf, 1.0)
    return nn.functional.cross_entropy(output, targets) * scale


@pytest.mark.usefixtures("late_reads")
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (nn.functional.cross_entropy, {}),
        (nn.functional.cross_entropy, {"clip": 0.1}),
        (counted, {"clip": 0.1}),
        (infinite, {"nonfinite": "skip", "most_skipped": 99}),
    ],
)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_numbers_of_updates_are_those_of_passes_as_they_are(
    loss: Callable[..., Any], options: dict[str, Any], microbatches: int
) -> None:
    results = []
    for words in ("", " graphs=true"):
        model = network(normalises=microbatches == 1)
        engine = engine_of(model, f"precision=fp64 microbatches={microbatches}{words}", loss=loss, **options)
        graphs = recorded(engine)[0] if words else None
        metrics, num_replays = [], 0
        for step in range(RECORDED_AFTER + 10):
            metrics.append(engine.step(batch(step)))
            num_replays += graphs is not None and graphs.numbers is not None
        assert (num_replays > 0) == bool(words)
        numbers = [(each.loss, each.grad_norm, each.tokens, each.skipped) for each in metrics]
        results.append((repr(numbers), engine.full_state_dict()))
        engine.close()
    (numbers, weights), (other_numbers, other_weights) = results
    assert numbers == other_numbers
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


@pytest.mark.usefixtures("late_reads")
def test_whoever_comes_between_passes_and_update_may_change_gradients() -> None:
    class Halving(StepObserver):
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def after_passes(self) -> None:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    norms = []
    for words in ("", "graphs=true "):
        engine = engine_of(network(), f"{words}precision=fp64")
        graphs = recorded(engine)[0] if words else None
        engine.observe(Halving(engine.module))
        norms.append([engine.step(batch(step)).grad_norm for step in range(RECORDED_AFTER + 3)])
        assert graphs is None or (graphs.enters_other_nodes and graphs.numbers is None)
    assert norms[0] == norms[1]


@pytest.mark.usefixtures("late_reads")
def test_a_step_that_is_refused_by_hand_has_other_numbers_than_its_replay() -> None:
    engine = engine_of(network())
    graphs, _ = recorded(engine)
    train(engine, RECORDED_AFTER + 2)
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    engine._update.refuse_next()
    metrics = engine.step(batch(0))
    assert graphs.numbers is not None
    with pytest.raises(echelon.UserError, match="changed by hand between two steps"):
        _ = metrics.loss
    assert all(map(torch.equal, before, engine.module.parameters()))


@pytest.mark.usefixtures("late_reads")
def test_gradients_that_a_loop_changes_before_its_update_count() -> None:
    results = []
    for words in ("", "graphs=true "):
        engine = engine_of(network(), f"{words}precision=fp64", clip=0.1)
        if words:
            recorded(engine)
        for step in range(RECORDED_AFTER + 4):
            engine.forward_backward(batch(step))
            for parameter in engine.module.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(3.0)
            results.append(engine.update().grad_norm)
    half = len(results) // 2
    assert results[:half] == results[half:]


def test_a_recording_that_does_something_else_is_never_used() -> None:
    class Wrong(FakeRecorder):
        def record(self, *arguments: Any) -> Any:
            recording = super().record(*arguments)
            self.recordings[-1].error = 0.1
            return recording

    plain, engine = engine_of(network(), "precision=fp64"), engine_of(network())
    recorded(engine, Wrong())
    with pytest.warns(
        UserWarning, match=r"a replay does not do what the model does: their gradients differ by 0\.1 of"
    ):
        losses = train(engine, 12)
    assert losses == train(plain, 12)


def test_what_a_replay_does_not_see_is_found_later() -> None:
    engine = engine_of(network())
    _, recorder = recorded(engine)
    train(engine, RECORDED_AFTER + 1)
    recorder.recordings[0].error = 0.1
    with pytest.raises(
        echelon.UserError, match="no longer do what model and loss do: their gradients differ"
    ):
        train(engine, 5)


def test_a_closed_engine_holds_no_recording() -> None:
    engine = engine_of(network())
    graphs, _ = recorded(engine)
    train(engine, RECORDED_AFTER + 1)
    engine.close()
    assert graphs._forms == {}


def test_the_distance_of_gradients_and_losses() -> None:
    tally = Tally(torch.tensor([1.0, 4.0, 4.0]))
    one = Recorded(tally, [torch.tensor([3.0, 4.0]), None])
    other = Recorded(tally, [torch.tensor([3.0, 3.0]), None])
    assert distance(one, one).tolist() == [0.0, 5.0, 0.0]
    assert distance(other, one).tolist() == [1.0, 5.0, 0.0]
    assert distance(one._replace(gradients=[None, None]), one)[0] == torch.inf
    assert distance(one._replace(tally=Tally(tally.row * 2)), one)[2] == 1.0
