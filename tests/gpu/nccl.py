"""Plans over real NCCL, all ranks on one GPU: python -m tests.gpu.nccl --runs 3 --out benchmarks/results

NCCL refuses two ranks on one GPU of one host. With a host identity of its own each rank counts as a host, and
NCCL talks over loopback sockets: slow, but the real library with its real order, streams and hangs. Under MPS
(`nvidia-cuda-mps-control -d`) the ranks share the GPU at the same time and not in turns.

`--backend gloo` runs the same plans on the CPU.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.result import make_result

from echelon import optim
from echelon.launching import TRAINING_MODULES, Ranks, preload
from echelon.launching.group import broadcast_bytes
from echelon.plan import Plan
from echelon.verify import Case
from echelon.verify.contract import judge, make_engine, result_of, train_rank
from echelon.verify.reference import TrainingResult
from tests.contract_models import CASES, SEQUENCE, tokens
from tests.nn.experts.all_gates import GATES
from tests.nn.experts.cases import case as expert_case
from tests.parallel.tensor.models import language_case

DEADLINE = 60.0  # seconds without a sign of life; then the launcher reports every rank's stack
_STEPS = 6
FILE = "nccl.json"

_SCHEDULES = ("naive", "gpipe", "1f1b", "zero-bubble", "interleaved chunks=2")
_CONTINUOUS = ("pipedream", "pipedream-vertical", "pipedream-2bw")
_TWO = [
    *[f"data=2 zero={level}" for level in range(4)],
    "data=2 microbatches=3",
    "data=2 sync=parameter-server",
    "data=2 sync=async staleness=0",
    "data=2 sync=async staleness=1",
    "tensor=2",
    "tensor=2 sequence=true",
    "context=2",
    "context=2 attention=all-to-all",
    *[f"pipeline=2 schedule={name} microbatches=4" for name in (*_SCHEDULES, *_CONTINUOUS)],
    *[f"data=2 zero={level} recompute=full" for level in (0, 3)],
    "data=2 zero=3 recompute=sqrt microbatches=2",
    "data=2 zero=2 recompute=selective",
    "data=2 zero=3 recompute=budget:160KiB contiguous=true",
    "tensor=2 recompute=full checkpoints=split",
    "tensor=2 sequence=true recompute=selective",
    "context=2 recompute=full",
    "pipeline=2 schedule=zero-bubble microbatches=4 recompute=full",
    "pipeline=2 schedule=pipedream microbatches=4 recompute=sqrt",
    *[f"data=2 zero={level} update=backward" for level in range(4)],
    "data=2 zero=2 microbatches=3 update=last-backward recompute=full",
    "pipeline=2 schedule=zero-bubble microbatches=4 update=last-backward",
]
_FOUR = [
    *[f"data=4 zero={level}" for level in range(4)],
    *[f"data=4 zero={level} shard=2" for level in (1, 3)],
    "data=4 zero=2 shard=2 microbatches=3",
    "data=2 context=2 zero=3 shard=2",
    *[f"pipeline=4 schedule={name} microbatches=5" for name in ("naive", "gpipe", "1f1b", "zero-bubble")],
    *[f"pipeline=4 schedule={name} microbatches=4" for name in _CONTINUOUS],
    *[f"data=2 pipeline=2 zero={level} microbatches=3" for level in range(4)],
    "pipeline=3-1 microbatches=4",
    "pipeline=2-1-1 microbatches=3 schedule=zero-bubble",
    "data=2 tensor=2 zero=1",
    "context=4",
    "context=4 attention=all-to-all",
    "context=2 data=2 zero=3 attention=all-to-all",
    "tensor=2 context=2 sequence=true",
    "tensor=2 context=2 attention=all-to-all",
    "tensor=2 pipeline=2 microbatches=2",
    "context=2 pipeline=2 microbatches=2",
    "data=2 tensor=2 zero=3 recompute=sqrt checkpoints=split",
    "data=2 pipeline=2 zero=3 microbatches=3 recompute=full contiguous=true",
    "data=2 tensor=2 zero=1 update=backward recompute=selective",
]
_EIGHT = [
    "data=8 zero=2",
    *[f"data=8 zero={level} shard=4 microbatches=2" for level in (1, 2, 3)],
    "data=4 tensor=2 zero=3 shard=2",
    "data=4 pipeline=2 zero=2 shard=2 microbatches=3",
    "data=2 pipeline=4 zero=1 microbatches=4",
    "data=2 pipeline=4 zero=3 microbatches=4",
    "data=2 tensor=2 pipeline=2 zero=1 microbatches=2",
    "context=8",
    "context=2 tensor=2 pipeline=2 microbatches=2",
    "context=2 tensor=2 pipeline=2 microbatches=2 attention=all-to-all",
    "data=2 pipeline=2 context=2 zero=2 microbatches=2 schedule=zero-bubble",
]
PLANS = {2: _TWO, 4: _FOUR, 8: _EIGHT}

# With models whose feed-forward parts are experts: for each gate, and for one gate.
_GATE_PLANS = {2: ["data=2 expert=2"], 4: ["data=4 expert=2", "data=4 expert=4"], 8: []}
_EXPERT_PLANS = {
    2: [
        *[f"data=2 expert=2 zero={level} microbatches=2" for level in range(4)],
        "data=2 expert=2 zero=3 recompute=full",
        "data=2 expert=2 update=backward",
        "data=2 expert=2 offload=optimizer,parameters",
        "tensor=2",
        "tensor=2 sequence=true",
        "context=2",
        *[f"pipeline=2 schedule={name} microbatches=4" for name in ("1f1b", "interleaved chunks=2")],
    ],
    4: [
        *[f"data=4 expert=2 zero={level}" for level in (1, 2, 3)],
        "data=4 expert=2 zero=3 shard=2",
        "data=2 expert=2 tensor=2",
        "data=2 expert=2 tensor=2 sequence=true",
        "data=2 expert=2 context=2",
        *[
            f"data=2 expert=2 pipeline=2 schedule={name} microbatches=4"
            for name in ("1f1b", "interleaved chunks=2", "zero-bubble")
        ],
        "data=2 expert=2 pipeline=2 microbatches=4 recompute=full",
    ],
    8: ["data=4 expert=4 pipeline=2 microbatches=4", "data=4 expert=2 tensor=2 zero=3"],
}
_ONE_GATE = "noisy"

Train = Callable[[Case, Plan], TrainingResult]


class Outcome(NamedTuple):
    """Of one plan: `result` is equal, different or failed; `gap` the largest difference."""

    plan: str
    scenario: str
    ranks: int
    result: str
    gap: float
    seconds: float
    text: str = ""


Numbered = tuple[int, Outcome]  # the number of the whole run, from 1


def environment(rank: int) -> dict[str, str]:
    """What makes NCCL take every rank for a host of its own."""
    return {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NCCL_HOSTID": f"echelon-{rank}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
    }


# Scenarios: how a rank trains.


def plainly(case: Case, plan: Plan) -> TrainingResult:
    return train_rank(case, plan, None)


def with_evaluations(case: Case, plan: Plan) -> TrainingResult:
    """An evaluation before and after every step."""
    with make_engine(case, plan) as engine:
        metrics = []
        for batch in case.batches():
            engine.evaluate(engine.local(batch))
            metrics.append(engine.step(engine.local(batch)))
        return result_of(engine, case, metrics)


def beside_another(case: Case, plan: Plan) -> TrainingResult:
    """Two engines in one process that take turns."""
    with make_engine(case, plan) as first, make_engine(case, plan) as second:
        metrics = []
        for batch in case.batches():
            metrics.append(first.step(first.local(batch)))
            second.step(second.local(batch))
        return result_of(first, case, metrics)


def from_checkpoint(case: Case, plan: Plan) -> TrainingResult:
    """Half of the steps under a plan of as many replicas as ranks, and the rest under this one."""
    batches = case.batches()
    half, metrics = len(batches) // 2, []
    path = _common_folder()
    with make_engine(case, Plan(data=plan.ranks, zero=1, precision=plan.precision)) as engine:
        metrics += [engine.step(engine.local(batch)) for batch in batches[:half]]
        engine.save(path / "half")
    with make_engine(case, plan) as engine:
        engine.load(path / "half")
        metrics += [engine.step(engine.local(batch)) for batch in batches[half:]]
        return result_of(engine, case, metrics)


def _common_folder() -> Path:
    """A new folder that all ranks know."""
    made = tempfile.mkdtemp(prefix="echelon-nccl-") if os.environ["RANK"] == "0" else ""
    return Path(broadcast_bytes(made.encode().ljust(256), 256).decode().strip())


def lengths_that_change(step: int) -> tuple[object, object]:
    """Batches of other lengths in every step."""
    length = SEQUENCE - step % 3
    return tuple(each[:, :length] for each in tokens(step))  # type: ignore[return-value]


SCENARIOS: dict[str, Train] = {
    "plain": plainly,
    "evaluations between steps": with_evaluations,
    "two engines": beside_another,
    "from a checkpoint of another plan": from_checkpoint,
    "shapes that change": plainly,
    "Adafactor": plainly,
    "SM3": plainly,
    **{f"gate {name}": plainly for name in GATES},
}
_SCENARIO_PLANS = {
    2: [
        "data=2 zero=3",
        "pipeline=2 microbatches=4",
        "pipeline=2 schedule=zero-bubble microbatches=4",
        "context=2",
        "context=2 attention=all-to-all",
        "tensor=2 sequence=true",
    ],
    4: [
        "data=2 pipeline=2 zero=2 microbatches=3",
        "pipeline=4 microbatches=5",
        "pipeline=3-1 microbatches=4",
    ],
    8: [],
}
# Where optimizers that need sums over rows and columns talk to other ranks.
_OPTIMIZER_PLANS = {
    2: ["data=2 zero=1", "data=2 zero=3 update=backward", "tensor=2"],
    4: ["data=2 tensor=2 zero=2"],
    8: [],
}
_OPTIMIZERS = {
    "Adafactor": partial(optim.Adafactor, lr=1e-2, eps=(1e-6, 1e-3)),
    "SM3": partial(optim.SM3, lr=1e-2),
}


def case_for(plan: str, scenario: str) -> Case:
    if scenario.startswith("gate "):
        return expert_case(scenario.removeprefix("gate "), plan)
    parsed = Plan.parse(plan)
    if parsed.tensor > 1 or parsed.context > 1:
        case = language_case("gpt", steps=_STEPS)
    elif "pipedream" in plan:
        case = dataclasses.replace(CASES["llama"], clip=None, steps=_STEPS)
    else:
        case = dataclasses.replace(CASES["gpt"], steps=_STEPS)
    if parsed.update != "step":
        case = dataclasses.replace(case, clip=None)
    if scenario in _OPTIMIZERS:
        case = dataclasses.replace(case, make_optimizer=_OPTIMIZERS[scenario])
    return dataclasses.replace(case, make_batch=lengths_that_change) if "shapes" in scenario else case


def works(ranks: int) -> Iterator[tuple[str, str]]:
    """Every plan, and some of them in every other scenario."""
    yield from ((plan, "plain") for plan in PLANS[ranks])
    gates = [name for name in SCENARIOS if name.startswith("gate ")]
    others = [name for name in SCENARIOS if name not in ("plain", *gates, *_OPTIMIZERS)]
    yield from ((plan, name) for plan in _OPTIMIZER_PLANS[ranks] for name in _OPTIMIZERS)
    yield from ((plan, name) for plan in _SCENARIO_PLANS[ranks] for name in others)
    yield from ((plan, name) for plan in _GATE_PLANS[ranks] for name in gates)
    yield from ((plan, f"gate {_ONE_GATE}") for plan in _EXPERT_PLANS[ranks])


class WarmRanks:
    """Ranks that are started again after a failure only."""

    def __init__(self, count: int, backend: str) -> None:
        self._count, self._backend = count, backend
        self._ranks: Ranks | None = None

    def verify(self, plan: str, scenario: str) -> Outcome:
        case, start = case_for(plan, scenario), time.perf_counter()
        try:
            if self._ranks is None:
                settings = environment if self._backend == "nccl" else None
                self._ranks = Ranks(
                    self._count, backend=self._backend, deadline=DEADLINE, environment=settings
                )
            precise = dataclasses.replace(Plan.parse(plan), precision="fp64")
            verdict = judge(case, self._ranks.run(SCENARIOS[scenario], case, precise))
        except Exception as error:  # whatever it is, it is the outcome of this plan
            self.close(failed=True)
            return self._outcome(plan, scenario, "failed", float("nan"), start, f"{error!r}\n{error}")
        result = "equal" if verdict.equal else "different"
        return self._outcome(
            plan, scenario, result, verdict.worst[1], start, "" if verdict.equal else str(verdict)
        )

    def _outcome(self, plan: str, scenario: str, result: str, gap: float, start: float, text: str) -> Outcome:
        seconds = round(time.perf_counter() - start, 2)
        return Outcome(plan, scenario, self._count, result, gap, seconds, text)

    def close(self, *, failed: bool = False) -> None:
        if self._ranks is not None:
            self._ranks.kill() if failed else self._ranks.close()
            self._ranks = None


def run(ranks: int, backend: str, scenarios: str) -> Iterator[Outcome]:
    warm = WarmRanks(ranks, backend)
    for plan, scenario in works(ranks):
        if scenarios in scenario:
            yield warm.verify(plan, scenario)
    warm.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.nccl")
    parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"))
    parser.add_argument("--ranks", type=int, nargs="+", default=list(PLANS))
    parser.add_argument("--runs", type=int, default=1, help="how many whole runs")
    parser.add_argument("--scenarios", default="", help="only those with this text in their name")
    parser.add_argument("--out", type=Path, help="folder to write nccl.json into")
    options = parser.parse_args(arguments)
    outcomes = _run_here(options) if len(options.ranks) == 1 else _run_together(options)
    bad = [outcome for _, outcome in outcomes if outcome.result != "equal"]
    print(f"{len(outcomes)} trainings, {len(bad)} not equal")
    if options.out is not None:
        _record(outcomes, options)
    return int(bool(bad) or not outcomes)


def _run_here(options: argparse.Namespace) -> list[Numbered]:
    preload(*TRAINING_MODULES)
    outcomes: list[Numbered] = []
    for number in range(options.runs):
        for outcome in run(options.ranks[0], options.backend, options.scenarios):
            outcomes.append((number + 1, outcome))
            print(f"{outcome.result:9} {outcome.seconds:6.2f} s  {outcome.gap:.1e}  {outcome.plan}", end="")
            print(f" [{outcome.scenario}]" + (f"\n{outcome.text}" if outcome.text else ""), flush=True)
    return outcomes


def _run_together(options: argparse.Namespace) -> list[Numbered]:
    """Each number of ranks in a process of its own, all at once: the GPU is idle most of the time."""
    with tempfile.TemporaryDirectory() as folder:
        common = ["--backend", options.backend, "--runs", str(options.runs), "--scenarios", options.scenarios]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.nccl", *common, "--ranks", str(n), "--out", f"{folder}/{n}"]
            )
            for n in options.ranks
        ]
        for process in processes:
            process.wait()
        records = [json.loads((Path(folder) / str(n) / FILE).read_text()) for n in options.ranks]
    return [(each.pop("run"), Outcome(**each)) for record in records for each in record["outcomes"]]


def _record(outcomes: Sequence[Numbered], options: argparse.Namespace) -> None:
    counts = {kind: sum(o.result == kind for _, o in outcomes) for kind in ("equal", "different", "failed")}
    chosen = f" --scenarios '{options.scenarios}'" if options.scenarios else ""
    command = f"python -m tests.gpu.nccl --runs {options.runs}{chosen} --out benchmarks/results"
    result = make_result("nccl", command, {"runs": options.runs, "backend": options.backend, **counts}, ())
    plain = [{"run": number, **outcome._asdict()} for number, outcome in outcomes]
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(result) | {"outcomes": plain}, indent=2)
    (options.out / FILE).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
