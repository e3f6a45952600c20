"""A main module that launches while a rank imports it: found in the rank, explained by the parent.

A rank imports the main module to find the functions in it. Where `launch` is called there without the
`if __name__ == "__main__":` line, every rank would launch ranks.
"""

import multiprocessing
import os

from echelon.errors import UserError

PROCESS_NAME = "echelon rank"  # how a process that imports the main module knows that it is our rank
EXIT_CODE = 97  # such a process has no pipe to its parent yet; this number is all it can say


def refuse_while_main_is_imported() -> None:
    """Stop a launch inside the import of the main module, where a rank is only starting."""
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):  # multiprocessing's own mark of that time
        return
    if process.name.startswith(PROCESS_NAME):
        os._exit(EXIT_CODE)  # the parent raises the error, once and not once for each rank
    raise unguarded()


def unguarded() -> UserError:
    """The error with the wrong and the right code."""
    return UserError(
        "The main module launches ranks while it is imported, and every rank imports it:\n"
        "\n"
        "    echelon.launch(main, ranks=4)          # wrong: runs in every rank again\n"
        "\n"
        '    if __name__ == "__main__":             # right: runs only in the script itself\n'
        "        echelon.launch(main, ranks=4)"
    )
