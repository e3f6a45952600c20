import io
import json

from rich.console import Console

from echelon.cli.doctor import Finding, Report, Section, render, section


def fail() -> list[Finding]:
    raise OSError("no such device")


def test_a_probe_that_fails_is_a_finding_and_the_others_still_answer() -> None:
    machine = section("Machine", {"tape": fail, "cores": lambda: [Finding("cores", "2")]})

    tape, cores = machine.findings
    assert (tape.name, tape.value, tape.status) == ("tape", "unknown", "note")
    assert "OSError: no such device" in tape.remark
    assert cores == Finding("cores", "2")


def test_a_report_is_plain_data_that_counts_its_warnings() -> None:
    warning = Finding("open files", "at most 256", "warn", "too few", 256)
    report = Report((Section("A", (Finding("x", "1"),)), Section("B", (warning,))))

    data = json.loads(json.dumps(report.to_dict()))

    assert report.warnings == [warning]
    assert data["warnings"] == 1
    assert data["sections"][1]["findings"] == [
        {"name": "open files", "value": "at most 256", "status": "warn", "remark": "too few", "number": 256}
    ]


WARNING = Finding("open files", "at most 256", "warn", "in this shell: ulimit -n 4096")


def text_of(*findings: Finding) -> str:
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(render(Report((Section("Machine", findings),))))
    return console.export_text()


def test_every_finding_is_a_line_with_its_remark() -> None:
    text = text_of(Finding("cores", "2"), WARNING)

    assert "Machine" in text
    assert "✓  cores" in text
    assert "!  open files  at most 256  in this shell: ulimit -n 4096" in text


def test_the_last_line_counts_warnings() -> None:
    assert text_of(Finding("cores", "2")).rstrip().endswith("No problems found.")
    assert "1 warning:" in text_of(WARNING)
    assert "2 warnings:" in text_of(WARNING, WARNING)


def test_what_a_machine_says_is_never_markup() -> None:
    assert "[/red]CPU[bold]" in text_of(Finding("processor", "[/red]CPU[bold]"))
