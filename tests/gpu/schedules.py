"""Every schedule over real NCCL, all ranks on one GPU: python -m tests.gpu.schedules --out benchmarks/results

Each plan runs in processes of its own, in which no kernel has been loaded: there a host waits for its device
in the middle of a step. A plan that hangs is killed after `--deadline` seconds without a sign of life, and
its outcome has the stacks of all ranks; the others go on. Several plans run at a time. After `--limit`
seconds no more are started, and those left are "not run".

`--backend gloo` runs the same plans on the CPU. See tests/gpu/nccl.py for how ranks share a GPU.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.result import make_result
from torch import nn

from echelon.errors import UserError
from echelon.launching import TRAINING_MODULES, RankHung, Ranks, preload
from echelon.models import ModelConfig, build
from echelon.plan import ASYNCHRONOUS_SCHEDULES, FLUSHED_SCHEDULES, Plan
from echelon.verify import Case
from echelon.verify.contract import judge, train_rank
from tests.cases import adamw
from tests.contract_models import token_loss
from tests.gpu.nccl import Outcome, environment
from tests.parallel.pipeline.models import SEQUENCE, VOCAB, tokens

FILE = "nccl-schedules.json"
_MICROBATCHES = {4: (2, 4, 8, 12), 8: (8,)}  # by the number of stages
_JOBS = {4: 2, 8: 1}  # plans of so many stages that run at a time
_SCHEDULE_FILE = "tests/program/golden/1f1b.txt"  # of 4 stages and 5 microbatches
_RESULTS = ("equal", "different", "hung", "failed", "not run")


def sixteen_layers() -> nn.Module:
    """Two for each of eight ranks, so that each can hold two chunks."""
    config = ModelConfig("gpt", 14, 8, 2, vocab=VOCAB, sequence=SEQUENCE, ffn=8, tied=False)
    return build(config)


def make_case() -> Case:
    return Case(sixteen_layers, partial(tokens, samples=24), token_loss, adamw, clip=None, steps=4)


def plans(stages: int) -> Iterator[str]:
    """Those that are legal."""
    names = {name: f"{name} chunks=2" if name == "interleaved" else name for name in FLUSHED_SCHEDULES}
    for schedule in (*ASYNCHRONOUS_SCHEDULES, *names.values()):
        for microbatches in _MICROBATCHES[stages]:
            plan = f"pipeline={stages} schedule={schedule} microbatches={microbatches}"
            try:
                Plan.parse(plan)
            except UserError:
                continue
            yield plan
    if stages == 4:
        yield f"pipeline=4 schedule={_SCHEDULE_FILE} microbatches=5"
    if stages == 8:
        yield "pipeline=8 schedule=pipedream-2bw microbatches=16"


def verify_plan(text: str, backend: str, deadline: float) -> Outcome:
    """Train in new processes, and compare with one device, or with what an asynchronous schedule means."""
    case, plan, start = make_case(), Plan.parse(f"{text} precision=fp64"), time.perf_counter()
    gap, error = float("nan"), ""
    try:
        settings = environment if backend == "nccl" else None
        with Ranks(plan.ranks, backend=backend, deadline=deadline, environment=settings) as ranks:
            verdict = judge(case, ranks.run(train_rank, case, plan, None))
        result, gap = ("equal" if verdict.equal else "different"), verdict.worst[1]
        error = "" if verdict.equal else str(verdict)
    except RankHung as hang:
        result, error = "hung", str(hang)
    except Exception as failure:  # whatever it is, it is the outcome of this plan
        result, error = "failed", f"{failure!r}\n{failure}"
    return Outcome(text, "cold", plan.ranks, result, gap, round(time.perf_counter() - start, 2), error)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.schedules")
    parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"))
    parser.add_argument("--stages", type=int, nargs="+", choices=(4, 8), default=[4, 8])
    parser.add_argument("--plans", default="", help="only those with this text")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds without a sign of life")
    parser.add_argument("--limit", type=float, default=330.0, help="seconds after which no plan is started")
    parser.add_argument("--part", type=int, nargs=2, metavar=("I", "OF"), help="run a part of the plans here")
    parser.add_argument("--out", type=Path, help=f"folder to write {FILE} into")
    options = parser.parse_args(arguments)
    outcomes = _run_parts(options) if options.part is None else _run_part(options)
    counts = {kind: sum(outcome.result == kind for outcome in outcomes) for kind in _RESULTS}
    print(f"{len(outcomes)} plans: {', '.join(f'{count} {kind}' for kind, count in counts.items())}")
    if options.out is not None:
        _record(outcomes, counts, options)
    return int(counts["equal"] < len(outcomes) or not outcomes)


def _run_part(options: argparse.Namespace) -> list[Outcome]:
    """One plan after the other."""
    preload(*TRAINING_MODULES)
    start, outcomes = time.perf_counter(), []
    index, parts = options.part
    chosen = [plan for stages in options.stages for plan in plans(stages) if options.plans in plan]
    for plan in chosen[index::parts]:
        if time.perf_counter() - start > options.limit:
            outcome = Outcome(plan, "cold", Plan.parse(plan).ranks, "not run", float("nan"), 0.0)
        else:
            outcome = verify_plan(plan, options.backend, options.deadline)
        outcomes.append(outcome)
        print(f"{outcome.result:9} {outcome.seconds:6.2f} s  {outcome.gap:.1e}  {plan}", end="")
        print(f"\n{outcome.text}" if outcome.text else "", flush=True)
    return outcomes


def _run_parts(options: argparse.Namespace) -> list[Outcome]:
    """Parts of the plans at a time, each in a process of its own: the GPU is idle most of the time."""
    parts = [(n, part, _JOBS.get(n, 1)) for n in options.stages for part in range(_JOBS.get(n, 1))]
    with tempfile.TemporaryDirectory() as folder:
        common = ["--backend", options.backend, "--plans", options.plans]
        common += ["--deadline", str(options.deadline), "--limit", str(options.limit)]
        command = [sys.executable, "-m", "tests.gpu.schedules", *common]
        processes = [
            subprocess.Popen(
                [*command, *f"--stages {n} --part {part} {jobs} --out {folder}/{n}-{part}".split()]
            )
            for n, part, jobs in parts
        ]
        for process in processes:
            process.wait()
        files = [Path(folder) / f"{n}-{part}" / FILE for n, part, _ in parts]
        records = [json.loads(file.read_text()) for file in files]
    return [Outcome(**each) for record in records for each in record["outcomes"]]


def _record(outcomes: Sequence[Outcome], counts: dict[str, int], options: argparse.Namespace) -> None:
    command = f"python -m tests.gpu.schedules --backend {options.backend} --out benchmarks/results"
    stages = " and ".join(map(str, options.stages))
    settings = {"backend": options.backend, "stages": stages, **{k: counts[k] for k in _RESULTS}}
    result = make_result("nccl-schedules", command, settings, ())
    options.out.mkdir(parents=True, exist_ok=True)
    plain = [outcome._asdict() for outcome in outcomes]
    text = json.dumps(dataclasses.asdict(result) | {"outcomes": plain}, indent=2)
    (options.out / FILE).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
