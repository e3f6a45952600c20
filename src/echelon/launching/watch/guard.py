"""Detects a main module that launches ranks while a rank imports it.

A rank imports the main module to find the functions in it. If that module calls `launch` without the
`if __name__ == "__main__":` line, every rank would launch ranks. The rank detects this; the parent
explains it.
"""

import multiprocessing
import os

from echelon.errors import UserError

PROCESS_NAME = "echelon rank"  # a process with this name that imports the main module is a rank
EXIT_CODE = 97  # a rank has no pipe to its parent yet: the exit code is all that it can report


def refuse_while_main_is_imported() -> None:
    """Refuse to launch during the import of the main module, when a rank is still starting."""
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):  # multiprocessing sets this during that import
        return
    if process.name.startswith(PROCESS_NAME):
        os._exit(EXIT_CODE)  # the parent raises the error once, instead of every rank
    raise missing_guard_error()


def missing_guard_error() -> UserError:
    """The error, with the wrong and the right code."""
    return UserError(
        "The main module launches ranks while it is imported, and every rank imports it:\n"
        "\n"
        "    echelon.launch(main, ranks=4)          # wrong: runs in every rank again\n"
        "\n"
        '    if __name__ == "__main__":             # right: runs only in the script itself\n'
        "        echelon.launch(main, ranks=4)"
    )
