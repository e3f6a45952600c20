"""Jobs of models with experts: their keys, what is kept of the gates, and a whole run."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from echelon.errors import UserError
from echelon.models import ExpertsConfig, load_hf, preset
from echelon.plan import Plan
from echelon.train.display import Display
from echelon.train.events import Event, GateLoad, Started, Starting, Stepped
from echelon.train.jobs.job import ExpertsJob, Job, ModelJob, OptimizerJob, as_plain
from echelon.train.jobs.job_file import read_job
from echelon.train.jobs.job_rules import job_errors
from echelon.train.jobs.machine_fit import rank_bytes
from echelon.train.run import Logbook, expert_picture
from echelon.train.runs.run_folder import RunFolder
from echelon.train.trainer import train

JOB = """
plan = "data=2 expert=2"
[model]
preset = "moe-tiny"
[model.experts]
num_experts = 4
balance = 0.05
"""


def stepped(step: int, *gates: GateLoad) -> Stepped:
    return Stepped(step, 2.5, 0.5, 1e-3, 4096, 0.25, 3_000_000, 0.02, 0.01, 80 * 2**20, experts=gates)


def load(*tokens: float, dropped: float = 0.0, gate: str = "blocks.0.mlp.gate") -> GateLoad:
    return GateLoad(gate, tokens, dropped, 1.25)


def test_a_table_of_experts_changes_those_of_the_preset(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB, encoding="utf-8")
    job = read_job(tmp_path / "job.toml", ["model.experts.top_k=1", "model.experts.gate=switch"])
    config = job.model.config()
    assert config.experts == ExpertsConfig(4, 1, hidden=192, gate="switch", balance=0.05)
    assert as_plain(job)["model"]["experts"]["gate"] == "switch"
    assert "model" not in as_plain(Job())


def test_experts_for_a_preset_that_has_none() -> None:
    table = ExpertsJob(num_experts=4, top_k=2, hidden=64)
    assert ModelJob(experts=table).config().experts == ExpertsConfig(4, 2, 64)
    (error,) = job_errors(Job(model=ModelJob(experts=ExpertsJob(top_k=2))))
    assert error.startswith("model: experts num_experts, hidden: must be set, because the preset has none")


def test_all_errors_of_the_table_at_once() -> None:
    with pytest.raises(UserError) as caught:
        read_job(None, ["model.experts.topk=2", "model.experts.hidden=true", "model.experts.balance=x"])
    errors = "\n".join(caught.value.errors)
    assert "model.experts.topk: there is no such key (did you mean 'top_k'?)" in errors
    assert "model.experts.hidden=true: must be an integer" in errors
    assert "model.experts.balance='x': must be a number" in errors
    (error,) = job_errors(Job(model=ModelJob("moe-tiny", experts=ExpertsJob(top_k=9))))
    assert error.startswith("model: top_k=9 num_experts=8")


def test_weights_and_images_have_no_table_of_experts(tmp_path: Path) -> None:
    changed = ExpertsJob(top_k=2)
    (error, *_) = job_errors(Job(model=ModelJob(weights=str(tmp_path), experts=changed)))
    assert "experts.top_k: config.json in the folder has the sizes; leave it out" in error
    (error,) = job_errors(Job(task="images", model=ModelJob(experts=changed)))
    assert error.startswith("model.experts.top_k=2: task=images does not read it")


def test_experts_are_divided_over_expert_ranks() -> None:
    config = preset("mixtral-8x7b")
    routed = config.num_routed_parameters
    assert routed == 32 * 8 * 3 * 4096 * 14336
    dense = config.num_parameters - routed

    def needed(plan: str) -> float:
        return rank_bytes(config.num_parameters, Plan.parse(plan), 2, routed).weights / 4

    assert needed("data=4") == config.num_parameters
    assert needed("data=4 expert=4") == dense + routed / 4
    assert needed("data=4 expert=2 zero=3") == (dense + routed) / 4


def test_metrics_and_picture_have_every_gate(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "a", {})
    logbook = Logbook(run)
    logbook.take(Starting("runs/a"))
    logbook.take(Started(42, 9000, "stdlib", "cpu"))
    gates = [load(6.0, 2.0, dropped=1.0), load(4.0, 4.0, gate="blocks.1.mlp.gate")]
    logbook.take(stepped(1, *gates))
    logbook.take(stepped(2, *gates))
    logbook.close()
    line = json.loads((run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert line["experts"] == [
        {"gate": "blocks.0.mlp.gate", "tokens": [6.0, 2.0], "dropped": 1.0, "entropy": 1.25},
        {"gate": "blocks.1.mlp.gate", "tokens": [4.0, 4.0], "dropped": 0.0, "entropy": 1.25},
    ]
    picture = (run.path / "experts.svg").read_text(encoding="utf-8")
    assert [name in picture for name in ("blocks.0.mlp.gate", "blocks.1.mlp.gate", "Entropy")] == [True] * 3
    assert logbook.summary()["largest_expert_share"] == 1.5


def test_a_large_picture_stays_small() -> None:
    gates = [load(*(float(index) for index in range(64)), gate=f"layer {index}") for index in range(48)]
    picture = expert_picture([stepped(step, *gates) for step in range(1, 500)])
    assert picture.count("share of tokens") == 12
    assert "largest" in picture
    assert len(picture) < 500_000


def test_the_live_panel_says_how_busy_the_busiest_is() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Display(Job(steps=1), console) as display:
        display.show(Starting("runs/a"))
        display.show(stepped(1, load(6.0, 2.0, dropped=0.8)))
        display._live.refresh()
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "busiest has 1.50 × its fair share" in text
    assert "10.0% dropped" in text


@pytest.mark.slow
def test_a_run_with_experts_on_two_ranks(tmp_path: Path) -> None:
    events: list[Event] = []
    job = Job(
        plan="data=2 expert=2",
        steps=3,
        batch=4,
        sequence=16,
        out=str(tmp_path),
        model=ModelJob(
            "moe-tiny", layers=2, width=32, heads=2, kv_heads=1, experts=ExpertsJob(num_experts=4, hidden=16)
        ),
        optimizer=OptimizerJob(warmup=1),
    )
    summary = train(job, events.append)
    last = [event for event in events if isinstance(event, Stepped)][-1]
    assert [gate.gate for gate in last.experts] == ["blocks.0.mlp.gate", "blocks.1.mlp.gate"]
    assert [sum(gate.tokens) for gate in last.experts] == [2 * last.tokens] * 2
    assert all(0 < gate.entropy <= 1.3863 for gate in last.experts)  # ln 4
    folder = Path(summary["run"])
    assert (folder / "experts.svg").exists()
    assert load_hf(folder / "model").config == job.model.config()
