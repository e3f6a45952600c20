"""Prints the settings that a preloaded module finds in the fork server, and those of processes that it forks:
a rank, and a process that the user starts from it. Then those of a process that a rank forks after it has
changed them."""

import gc
import json
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection

NAME = "PYTORCH_NVML_BASED_CUDA_CHECK"


def settings() -> dict[str, object]:
    return {
        "NVML": os.environ.get(NAME),
        "collects garbage": gc.isenabled(),
        "hears Ctrl-C": signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "hears SIGTERM": signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "SIGUSR2 is free": signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL,
    }


def inspect_rank() -> dict[str, object]:
    import asking_module

    server = {
        "NVML": asking_module.answer,
        "collects garbage": asking_module.collects_garbage,
        "hears Ctrl-C": asking_module.hears_ctrl_c,
        "hears SIGTERM": asking_module.hears_sigterm,
    }
    rank = settings() | {"frozen": gc.get_freeze_count()}
    gc.disable()
    os.environ[NAME] = "mine"
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    return {"server": server, "rank": rank, "fork of a rank": inspect_fork()}


def inspect_fork() -> object:
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, json.dumps(settings()).encode())
        os._exit(0)
    os.wait()
    return json.loads(os.read(reading, 10_000))


def inspect_process(connection: Connection) -> None:
    connection.send(settings() | {"frozen": gc.get_freeze_count()})


def inspect_user_process() -> object:
    context = multiprocessing.get_context("forkserver")
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=inspect_process, args=(writing,))
    process.start()
    found = reading.recv()
    process.join()
    return found


if __name__ == "__main__":
    from echelon.launching import launch, preload

    os.environ.pop(NAME, None)
    preload("asking_module")
    (found,) = launch(inspect_rank, 1)
    print(json.dumps(found | {"user's process": inspect_user_process()}))
