"""The copies of an engine's state in memory: saved every so many steps, and found again after a fault.

save    each rank copies all that it owns to a file in memory; a thread hashes it, and sends it to the
        next host. The generation before it stays until all ranks have said, at the next save, that this
        one is whole
find    ranks list what their hosts have, and agree on the newest generation of which there is the file of
        every rank; a rank that has lost its own gets it from the host that keeps its copy

    hosts      a  a  b  b  c  c
    rank       0  1  2  3  4  5
    its copy   2  3  4  5  0  1           and back, to a rank that has lost its file

The thread sends and receives over a process group of its own: no training step waits for it.

    sender       sizes | manifest | piece 0 | piece 1 | …         all are queued at once, from where they are
    receiver     sizes | manifest | piece 0 | …                   one at a time, to where they will be

Bytes are bytes: nothing that arrives is run, and what is read from it later is compared with its hash.
"""

import math
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives import Group
from echelon.collectives.agreement import agree_on_every_rank, check_on_every_rank, gather_values
from echelon.errors import UserError
from echelon.launching import beat
from echelon.state.assembly import RankSlice, exchange_slices
from echelon.state.checkpoint.assignment import signature
from echelon.state.checkpoint.copies import rank_file
from echelon.state.checkpoint.copies.folder import (
    Entry,
    MappedFile,
    MemoryFolder,
    file_name,
    generation_of,
    host_name,
    step_of,
)
from echelon.state.checkpoint.manifest import MOST_BYTES, Manifest, OtherVersionError
from echelon.state.checkpoint.part_writer import FileLayout
from echelon.state.checkpoint.saved import SavedState
from echelon.state.ownership import OwnedSlice

Found = Mapping[str, Sequence[int]]  # by generation, the ranks whose files are there


class Sending(NamedTuple):
    """A file of rank `receiver`, which the rank `sender` has on its host."""

    sender: int
    receiver: int


def receivers(hosts: Sequence[str]) -> list[int | None]:
    """Return by rank the rank that keeps its copy; None where all ranks are on one host."""
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return [None] * len(hosts)
    members = {name: [rank for rank, host in enumerate(hosts) if host == name] for name in names}
    chosen: list[int | None] = []
    for rank, host in enumerate(hosts):
        following = members[names[(names.index(host) + 1) % len(names)]]
        chosen.append(following[members[host].index(rank) % len(following)])
    return chosen


def whole_generations(found: Sequence[Found]) -> list[str]:
    """List the generations with a file of every rank on some host, newest first; `found`: by rank."""
    names = sorted({name for of_rank in found for name in of_rank}, reverse=True)
    ranks = set(range(len(found)))
    return [name for name in names if ranks <= {rank for each in found for rank in each.get(name, ())}]


def sendings(generation: str, found: Sequence[Found]) -> list[Sending]:
    """Return how each rank without its file gets it."""
    holders = [set(of_rank.get(generation, ())) for of_rank in found]
    return [
        Sending(next(other for other, held in enumerate(holders) if rank in held), rank)
        for rank, here in enumerate(holders)
        if rank not in here
    ]


PIECE_BYTES = 1 << 26
_MOST_FILE_BYTES = 1 << 50


class RankCopy(NamedTuple):
    """The bytes of a manifest, and of the file that it describes."""

    manifest: Tensor
    file: Tensor


def num_files(host: str, hosts: Sequence[str], keepers: Sequence[int | None]) -> int:
    """Return how many ranks have their state on a host: its own, and those whose copies it keeps."""
    copies = [keeper for keeper in keepers if keeper is not None and hosts[keeper] == host]
    return list(hosts).count(host) + len(copies)


def send(copy: RankCopy | None, to: int, group: dist.ProcessGroup) -> list[dist.Work]:
    """Begin to send a copy, or the word that there is none. Its memory must stay until each work is done."""
    if copy is None:
        parts = [torch.zeros(2, dtype=torch.int64)]
    else:
        sizes = torch.tensor([copy.manifest.numel(), copy.file.numel()])
        parts = [sizes, copy.manifest, *copy.file.split(PIECE_BYTES)]
    return [work for part in parts if (work := dist.isend(part, to, group)) is not None]


def receive(make_room: Callable[[int], Tensor], source: int, group: dist.ProcessGroup) -> RankCopy:
    """Receive a file into the memory of `make_room(size)`; if that raises, drop it: no sender waits."""
    sizes = torch.empty(2, dtype=torch.int64)
    dist.recv(sizes, source, group)
    manifest_bytes, file_bytes = sizes.tolist()
    if manifest_bytes == file_bytes == 0:
        raise UserError(f"rank {source} could not make its copy in memory, and sends none")
    if not 0 < manifest_bytes <= MOST_BYTES or not 0 < file_bytes <= _MOST_FILE_BYTES:
        raise UserError(f"rank {source} sends a copy of {file_bytes} bytes, which no rank has")
    manifest = torch.empty(manifest_bytes, dtype=torch.uint8)
    dist.recv(manifest, source, group)
    try:
        file = make_room(file_bytes)
    except UserError:
        # The sender has queued all of it: a receiver that does not take it would block the next save.
        dropped = torch.empty(min(file_bytes, PIECE_BYTES), dtype=torch.uint8)
        for begin in range(0, file_bytes, PIECE_BYTES):
            dist.recv(dropped[: file_bytes - begin], source, group)
        raise
    for piece in file.split(PIECE_BYTES):
        dist.recv(piece, source, group)
    return RankCopy(manifest, file)


Say = Callable[[str], None]

_DAMAGED, _OTHER_PLAN, _OTHER_VERSION = "damaged", "other plan", "other version"


class FoundCopies(NamedTuple):
    """This rank's state, of a generation that is whole. `received`: the ranks that had lost theirs."""

    step: int
    generation: str
    saved: SavedState
    received: tuple[int, ...]


@final
class MemoryCopies:
    """The copies of one run, on one rank; all ranks call the same. `group` is that of all ranks."""

    def __init__(self, folder: MemoryFolder, plan: str, group: Group, device: torch.device) -> None:
        self._folder, self._plan, self._group, self._device = folder, plan, group, device
        self._hosts = [str(host) for host in self._gather(host_name(folder.path))]
        self._receivers = receivers(self._hosts)
        self._network = dist.new_group(backend="gloo") if len(set(self._hosts)) > 1 else None
        self._files: dict[Path, MappedFile] = {}
        self._signature, self._lists = "", list[list[RankSlice]]()
        self._kept: str | None = None  # the newest generation that all ranks have
        self._written: str | None = None  # that which the thread writes, or has written
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def check_room(self, rank_bytes: float) -> None:
        """Refuse a RAM disk that is too small for states of so many bytes at least, on every rank."""
        host = self._hosts[self._group.rank]
        files = num_files(host, self._hosts, self._receivers)
        check_on_every_rank(lambda: self._folder.check_room(rank_bytes, files))

    # Save.

    def save(self, step: int, owned: Sequence[OwnedSlice], about: Manifest) -> None:
        """Keep a copy of what this rank owns; returns when it is made, and not yet hashed or sent."""
        generation, is_same = self._begin(step, signature(owned))
        if not is_same:
            self._lists = exchange_slices(owned, self._group, self._device)
            self._signature = signature(owned)
        numbers = {
            name: value for row in self._gather(rank_file.own_numbers(owned)) for name, value in row.items()
        }
        layout = rank_file.layout_of(self._group.rank, owned)
        slots = []

        def copy() -> None:
            slots.append(self._folder.free_slot(self._group.rank, self._kept))
            rank_file.fill(self._room(slots[0], self._group.rank, layout.size), layout, owned)

        check_on_every_rank(copy)
        manifest = rank_file.describe_file(about, self._lists, layout, numbers)
        self._start(generation, slots[0], layout, manifest)

    def _begin(self, step: int, owned_now: str) -> tuple[str, bool]:
        """Name the generation, and say whether all ranks own what they did. The one before is whole now."""

        def report() -> bool:
            self._wait()
            return self._signature == owned_now

        token, is_same = agree_on_every_rank(report, lambda same: [secrets.token_hex(8), all(same)])
        self._kept = self._written or self._kept
        return generation_of(step, str(token)), bool(is_same)

    def _start(self, generation: str, slot: int, layout: FileLayout, manifest: Manifest) -> None:
        kept, memory = self._kept, self._room(slot, self._group.rank, layout.size)

        def work() -> None:
            copy, errors = None, list[Exception]()
            try:
                data = rank_file.with_hash(manifest, layout, memory).as_bytes()
                self._folder.write_manifest(Entry(self._group.rank, generation, slot), data)
                copy = RankCopy(rank_file.as_tensor(data), memory)
            except Exception as error:
                errors.append(error)
            try:  # in any case: other hosts wait for a copy, or for the word that there is none
                self._send_on(generation, copy, kept)
            except Exception as error:
                errors.append(error)
            self._error = errors[0] if errors else None

        self._written = generation  # kept when the next save, or `finish`, has agreed that all ranks have it
        self._thread = threading.Thread(target=work, name="echelon-memory-copy", daemon=True)
        self._thread.start()

    def _send_on(self, generation: str, copy: RankCopy | None, kept: str | None) -> None:
        """Send this rank's file, or that there is none, to the next host, and keep those of others."""
        receiver = self._receivers[self._group.rank]
        if receiver is None or self._network is None:
            return
        sent = send(copy, receiver, self._network)
        errors: list[UserError] = []
        for source in [rank for rank, each in enumerate(self._receivers) if each == self._group.rank]:
            try:
                self._receive(source, source, generation, kept)
            except UserError as error:  # raised later: the other sources are sending already
                errors.append(error)
        for work in sent:
            work.wait()
        if errors:
            raise errors[0]

    def _receive(self, source: int, rank: int, generation: str, kept: str | None) -> None:
        """Receive the file of `rank` from `source`, and write its manifest when it is whole."""
        assert self._network is not None
        slot = self._folder.free_slot(rank, kept)
        copy = receive(lambda size: self._room(slot, rank, size), source, self._network)
        self._folder.write_manifest(Entry(rank, generation, slot), copy.manifest.numpy().tobytes())

    def _room(self, slot: int, rank: int, size: int) -> Tensor:
        path = self._folder.file(slot, rank)
        if path not in self._files or self._files[path].size != size:
            self._files.pop(path, None)
            self._files[path] = MappedFile(path, size)
        return self._files[path].memory

    def finish(self) -> None:
        """Return when the last generation is whole on all ranks; raises what went wrong on any of them."""
        check_on_every_rank(self._wait)
        self._kept = self._written or self._kept

    def _wait(self) -> None:
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(1.0)
            beat()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            self._written = None
            raise error

    # Find.

    def find(self, say: Say, *, before: float = math.inf) -> FoundCopies | None:
        """Find the newest whole generation from before a step, with every hash compared; None without one.

        Nothing is loaded by this. What is damaged, or of another plan, is named to `say`. Copies of another
        version are an error: they may be whole.
        """
        given_up: set[str] = set()
        received: tuple[int, ...] = ()
        while True:
            found: list[Found] = self._gather(self._folder.held())
            early = [name for name in whole_generations(found) if step_of(name) < before]
            candidates = [name for name in early if name not in given_up]
            if not candidates:
                return None
            generation = candidates[0]
            missing = sendings(generation, found)
            attempt = self._open(generation, missing)
            if self._is_refused(generation, attempt, given_up, say):
                continue
            if missing:
                received = tuple(each.receiver for each in missing)
                attempt = self._send_back(generation, missing, attempt)
                if self._is_refused(generation, attempt, given_up, say):
                    given_up.add(generation)
                    continue
            assert attempt.saved is not None
            return FoundCopies(step_of(generation), generation, attempt.saved, received)

    def keep_only(self, found: FoundCopies | None) -> None:
        """Forget other generations: training goes on from these copies, or from somewhere else."""
        self._kept, self._written = (None if found is None else found.generation), None
        for entry in self._folder.entries():
            if entry.generation != self._kept:
                self._folder.forget(entry)

    def steps(self) -> list[int]:
        return [step_of(name) for name in whole_generations(self._gather(self._folder.held()))]

    def _open(self, generation: str, missing: Sequence[Sending]) -> "_Attempt":
        """Open this rank's own file, if it is here, and those that it sends; none that is damaged."""
        attempt, entries = _Attempt(), {(each.rank, each.generation): each for each in self._folder.entries()}
        plan = self._plan, self._group.size
        wanted = [self._group.rank, *(each.receiver for each in missing if each.sender == self._group.rank)]
        for rank in wanted:
            entry = entries.get((rank, generation))
            if entry is None:
                continue
            try:
                saved = rank_file.open_rank_file(self._folder.manifest(entry), plan)
            except (rank_file.OtherPlanError, OtherVersionError) as error:
                is_plan = isinstance(error, rank_file.OtherPlanError)
                attempt.errors.append([str(error), _OTHER_PLAN if is_plan else _OTHER_VERSION])
                return attempt
            except UserError as error:
                self._folder.forget(entry)
                attempt.errors.append([str(error), _DAMAGED])
                continue
            if rank == self._group.rank:
                attempt.saved = saved
            else:
                data = rank_file.as_tensor(self._folder.manifest(entry).read_bytes())
                size = saved.manifest.files[file_name(rank)].bytes
                attempt.sent[rank] = RankCopy(data, self._room(entry.slot, rank, size))
        return attempt

    def _send_back(self, generation: str, missing: Sequence[Sending], before: "_Attempt") -> "_Attempt":
        """Send files to the ranks that have lost them, which open them."""
        assert self._network is not None, "a file that this host has is not missing on it"
        sent = [work for rank, copy in before.sent.items() for work in send(copy, rank, self._network)]
        attempt = before
        for sender in [each.sender for each in missing if each.receiver == self._group.rank]:
            try:
                self._receive(sender, self._group.rank, generation, generation)
                attempt = self._open(generation, ())
            except UserError as error:
                attempt = _Attempt(errors=[[str(error), _DAMAGED]])
        for work in sent:
            work.wait()
        return attempt

    def _is_refused(self, generation: str, attempt: "_Attempt", given_up: set[str], say: Say) -> bool:
        """Return whether any rank has found an error; each is said once. Another version is raised on all."""
        errors = [error for row in self._gather(attempt.errors) for error in row]
        other_versions = [text for text, kind in errors if kind == _OTHER_VERSION]
        if other_versions:
            raise OtherVersionError(other_versions[0])
        said = errors[:1] + [error for error in errors[1:] if error[1] != _OTHER_PLAN]
        for text in dict.fromkeys(text for text, _ in said):
            say(text)
        if any(kind == _OTHER_PLAN for _, kind in errors):
            given_up.add(generation)
        return bool(errors)

    def _gather(self, value: Any) -> list[Any]:
        return gather_values(value, self._group, self._device)


@dataclass
class _Attempt:
    """The files of a generation that a rank has opened, and the errors: each text with its kind."""

    saved: SavedState | None = None
    sent: dict[int, RankCopy] = field(default_factory=dict)
    errors: list[list[str]] = field(default_factory=list)
