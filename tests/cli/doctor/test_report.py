import json

from echelon.cli.doctor.report import Finding, Report, Section, section


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
