"""echelon doctor"""

from echelon.cli.options import Json, console, print_json


def doctor(as_json: Json = False) -> None:
    """What this machine can do, what is missing, and what that costs."""
    from echelon.cli.doctor import examine, render

    screen = console(as_json)
    with screen.status("measuring …"):
        report = examine()
    if as_json:
        print_json(report.to_dict())
    else:
        screen.print(render(report))
