"""Launches a rank, and is killed before it starts: the fork server is still importing."""

from echelon.launching import launch, preloading

if __name__ == "__main__":
    preloading._modules.insert(1, "slow_module")  # torch would do, on a busy machine
    launch(print, 1)
