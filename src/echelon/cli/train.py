"""echelon train"""

from pathlib import Path

from echelon.cli.options import JobFile, Json, PlanText, Settings, console, print_json
from echelon.cli.signals import ctrl_c_keeps_notes
from echelon.launching import start_fork_server
from echelon.launching.torchrun import is_under_torchrun


def train(
    job: JobFile = None, plan: PlanText = None, settings: Settings = None, as_json: Json = False
) -> None:
    """Train. Without a job file: a small GPT on two ranks, about two minutes on a laptop."""
    if not is_under_torchrun() and (job is None or job.exists()):
        start_fork_server("echelon.train.trainer", "torch._dynamo")
    from echelon.train.display import Display, print_summary
    from echelon.train.job_file import read_job
    from echelon.train.trainer import train as run

    job_to_run = read_job(job, settings or (), plan)
    screen = console(as_json)
    with ctrl_c_keeps_notes(), Display(job_to_run, screen) as display:
        summary = run(job_to_run, display.show)
    if not summary:  # under torchrun, only rank 0 prints
        return
    if as_json:
        print_json(summary)
    else:
        sample = Path(summary["run"]) / "sample.txt"
        text = sample.read_text(encoding="utf-8") if sample.exists() else ""  # a large model writes none
        print_summary(summary, text, screen)
