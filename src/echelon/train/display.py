"""The display of a training: a live panel on a terminal, plain lines elsewhere, and a summary."""

import shlex
import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from echelon.quantities import show_bytes
from echelon.train import events
from echelon.train.charts import sparkline
from echelon.train.jobs.job import Job

_LINE_SECONDS = 5.0  # between plain lines


class Display:
    """`with Display(job, console) as display: train(job, display.show)`"""

    def __init__(self, job: Job, console: Console, every: int | None = None) -> None:
        """`every`: plain lines, one for so many steps, on a terminal too."""
        self._job, self._console, self._every = job, console, every
        self._is_live = console.is_terminal and every is None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("step", total=job.steps)
        self._num_steps = job.steps
        self._losses: list[float] = []
        self._evaluated: events.Evaluated | None = None
        self._last: events.Stepped | None = None
        self._unit = "tokens"
        self._began = self._last_line = time.monotonic()
        self._first = 1  # of the steps since then
        self._skipped: set[str] = set()  # of the audit, as shown
        self._live = Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, event: events.Event) -> None:
        match event:
            case events.Starting(run):
                # Not earlier: a refused job has nothing to show, and under torchrun only rank 0 has events.
                plan, job = escape(self._job.plan), self._job
                most = "" if job.minutes is None else f", as many as fit into {job.minutes:g} minutes"
                self._console.print(f"[bold]echelon train[/]  plan {plan}  {job.steps} steps{most}")
                self._console.print(f"starting ranks … the run is kept in {run}", markup=False)
                if self._is_live:
                    self._live.start()
            case events.Started():
                self._console.print(
                    f"{event.parameters:,} parameters on {event.device}; "
                    f"{event.train_tokens:,} {event.unit} of {event.corpus}",
                    markup=False,
                )
                self._unit = event.unit
                self._begin_after(event.after_step)
                if event.after_step:
                    self._console.print(f"going on after step {event.after_step}, {event.source}")
            case events.Restarting():
                self._console.print(
                    f"[yellow]{escape(event.reason.splitlines()[0])}[/]; restarting "
                    f"({event.number} of {event.limit} restarts since the last checkpoint)"
                )
            case events.RolledBack(step, _, reason, first, end, number, limit):
                batches = f"batch {first}" if first == end - 1 else f"batches {first} to {end - 1}"
                self._console.print(
                    f"[yellow]{escape(reason)}[/]; going back to step {step}, without {batches} "
                    f"({number} of {limit} rollbacks)"
                )
                self._begin_after(step)
            case events.Limited(steps, of, minutes, _):
                self._num_steps = steps
                self._progress.update(self._task, total=steps)
                self._console.print(f"{steps} of {of} steps fit into {minutes:g} minutes")
            case events.Noted():
                self._console.print(f"[yellow]{escape(event.text)}[/]")
            case events.Audited(results):
                skipped = [str(result) for result in results if result.outcome == "skipped"]
                new = [each for each in skipped if each not in self._skipped]
                self._skipped.update(new)
                if new:
                    self._console.print(f"[dim]audit of {escape('; '.join(new))}[/]")
            case events.Stepped():
                self._last = event
                self._losses.append(event.loss)
                self._progress.update(self._task, completed=event.step)
            case events.Evaluated():
                self._evaluated = event
            case events.Sampled():
                return
        if self._is_live:
            self._live.update(self._panel())
        elif isinstance(event, events.Stepped):
            self._plain_line(event)
        elif isinstance(event, events.Evaluated):
            self._console.print(f"step {event.step:>6}  validation loss {_validation(event)}")

    def _begin_after(self, step: int) -> None:
        """Count from here; what came after `step` is trained again."""
        self._began, self._first = time.monotonic(), step + 1
        del self._losses[step:]
        if step:
            self._progress.update(self._task, completed=step)

    def _panel(self) -> Group:
        table = Table.grid(padding=(0, 2))
        if self._last is not None:
            for name, value in self._figures(self._last):
                table.add_row(f"[dim]{name}[/]", value)
        return Group(self._progress, table)

    def _figures(self, step: events.Stepped) -> list[tuple[str, str]]:
        hidden = f"{step.comm_hidden_seconds / step.comm_seconds:.0%}" if step.comm_seconds else "nothing"
        figures = [
            ("loss", f"[bold]{step.loss:.4f}[/]  {sparkline(self._losses, 48)}"),
            ("gradient norm", f"{step.grad_norm:.3f}"),
            ("learning rate", f"{step.learning_rate:.2e}"),
            (f"{self._unit}/s", f"{step.tokens / step.seconds:,.0f}"),
            ("memory per rank", show_bytes(step.memory_bytes)),
            ("sent per step", f"{show_bytes(step.moved_bytes)}, {hidden} hidden behind compute"),
        ]
        if step.experts:
            figures.append(("experts", _experts(step)))
        if step.skipped and step.loss_scale == 1.0:
            figures.append(("skipped", "loss or gradients were not finite"))
        if step.loss_scale != 1.0:
            figures.append(("loss scale", f"{step.loss_scale:,.0f}{', skipped' if step.skipped else ''}"))
        if self._evaluated is not None:
            at = f"[dim]at step {self._evaluated.step}[/]"
            figures.insert(1, ("validation loss", f"{_validation(self._evaluated)}  {at}"))
        return figures

    def _plain_line(self, step: events.Stepped) -> None:
        now = time.monotonic()
        is_due = step.step % self._every == 0 if self._every else now - self._last_line >= _LINE_SECONDS
        if not is_due and step.step not in (self._first, self._num_steps):
            return
        self._last_line = now
        left = (now - self._began) / (step.step - self._first + 1) * (self._num_steps - step.step)
        self._console.print(
            f"step {step.step:>6}/{self._num_steps}  loss {step.loss:.4f}  "
            f"{step.tokens / step.seconds:>9,.0f} {self._unit}/s  {show_bytes(step.memory_bytes)} per rank  "
            f"{left:.0f} s left",
            highlight=False,
        )


def print_summary(summary: dict[str, Any], sample: str, console: Console) -> None:
    """The end of a run: its results, a sample of what the model does, and where everything is."""
    unit, accuracy = summary["unit"], summary["validation_accuracy"]
    if sample:
        console.rule("a sample of what the model " + ("writes" if unit == "tokens" else "says"))
        console.print(sample, markup=False, highlight=False)
        console.rule()
    validation, share = summary["validation_loss"], summary.get("largest_expert_share")
    console.print(
        f"loss {summary['first_loss']:.4f} → [bold]{summary['loss']:.4f}[/]"
        + ("" if validation is None else f"   validation {validation:.4f}")
        + ("" if accuracy is None else f"   accuracy [bold]{accuracy:.1%}[/]")
        + ("" if share is None else f"   busiest expert {share:.2f} × fair")
        + f"   {summary['tokens']:,} {unit}, {summary['tokens_per_second']:,.0f} {unit}/s"
    )
    console.print(
        f"the run is in [bold]{escape(summary['run'])}[/] "
        f"(loss.svg, {'' if share is None else 'experts.svg, '}metrics.jsonl, sample.txt, model/)"
    )
    command = f"echelon report {shlex.quote(summary['run'])}"
    console.print(f"a page about it: [bold]{escape(command)}[/]", soft_wrap=True)


def _validation(event: events.Evaluated) -> str:
    accuracy = "" if event.accuracy is None else f"  accuracy {event.accuracy:.1%}"
    return f"{event.loss:.4f}{accuracy}"


def _experts(step: events.Stepped) -> str:
    busiest = max(step.experts, key=lambda gate: gate.largest_share)
    slots = sum(sum(gate.tokens) for gate in step.experts)
    dropped = sum(gate.dropped for gate in step.experts) / max(slots, 1.0)
    where = f"[dim]in {escape(busiest.gate)}[/]"
    return f"busiest has {busiest.largest_share:.2f} × its fair share {where}, {dropped:.1%} dropped"
