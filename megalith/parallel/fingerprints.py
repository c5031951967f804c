"""parallel.check_collectives: before every collective, the ranks of its group compare fingerprints
of it.

A rank that starts another operation, or has another shape, makes the others wait forever or sum
wrong values. Here each rank first writes a fingerprint to the store and reads those of its peers.
That costs several round trips to the store per collective, so it is for debugging, not for
training.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch._C._distributed_c10d import Store

from megalith.errors import CollectiveError
from megalith.observe.flight import CollectiveRecord, axes_name, short_path
from megalith.parallel.watch import wait_for

PATIENCE_SECONDS = 1.0
"""Time after which absent ranks are checked for waiting on this rank (a deadlock)."""

Fingerprint = Mapping[str, Any]  # Any: JSON


class Fingerprints:
    """Compares each collective of this rank with those of its peers, and detects deadlocks."""

    def __init__(self, store: Store, rank: int, where: Callable[[int], str] = str) -> None:
        self.store, self.rank, self.where = store, rank, where

    def compare(self, entry: CollectiveRecord) -> None:
        """Return when every rank of the group is about to start the same collective.

        A message is compared by its second end, so that it may be sent before its receiver waits
        for it.

        Raises:
            CollectiveError: on every rank of the group, with the collective of each; or the ranks
            wait for each other in different collectives.
        """
        if entry.peer is not None:
            self._compare_message(entry, entry.peer)
            return
        self.store.set(_key(entry, self.rank), json.dumps(fingerprint(entry)))
        # all have reached the previous one, so the one before that is no longer read
        if entry.number >= 2:
            self.store.delete_key(f"{entry.lane}/{entry.number - 2}/{self.rank}")
        self._wait_for_all(entry)
        fingerprints = {rank: json.loads(self.store.get(_key(entry, rank))) for rank in entry.ranks}
        if not fingerprints_match(fingerprints, entry.ranks):
            what = f"number {entry.number} over {axes_name(entry.axes)}"
            self._raise_mismatch(fingerprints, what)

    def _compare_message(self, entry: CollectiveRecord, peer: int) -> None:
        group, sends = entry.lane.rsplit(" ", 2)[0], entry.op == "send"
        ends = (self.rank, peer) if sends else (peer, self.rank)
        keys = [f"{group}/{ends[0]} to {ends[1]}/{entry.number}/{end}" for end in ends]
        local_key, peer_key = keys if sends else reversed(keys)
        arrivals = f"{group}/{ends[0]} to {ends[1]}/{entry.number}"
        self.store.set(local_key, json.dumps(fingerprint(entry)))
        # counted after the write, so the second end finds both fingerprints
        if self.store.add(arrivals, 1) == 1:
            return
        fingerprints = {self.rank: fingerprint(entry), peer: json.loads(self.store.get(peer_key))}
        for key in (*keys, arrivals):
            self.store.delete_key(key)
        if any(
            fingerprints[self.rank][name] != fingerprints[peer][name] for name in ("shape", "dtype")
        ):
            self._raise_mismatch(fingerprints, f"message {entry.number} between them")

    def _wait_for_all(self, entry: CollectiveRecord) -> None:
        keys = [_key(entry, rank) for rank in entry.ranks]
        published = False
        suspected: dict[int, str] | None = None
        # a rank that is only slow is left to the timeout
        while not wait_for(self.store, keys, PATIENCE_SECONDS):
            absent = [
                rank
                for rank, key in zip(entry.ranks, keys, strict=True)
                if not self.store.check([key])
            ]
            waits = {
                "text": entry.describe(),
                "channel": entry.lane,
                "number": entry.number,
                "absent": absent,
            }
            self.store.set(f"waits/{self.rank}", json.dumps(waits))
            published, before, suspected = True, suspected, self._find_cycle([self.rank])
            # Required twice: entries that change during the check may form a false cycle.
            if suspected is not None and suspected == before:
                lines = "\n".join(
                    f"  rank {self.where(rank)}: {text}" for rank, text in suspected.items()
                )
                raise CollectiveError(
                    f"ranks wait for each other in different collectives:\n{lines}\nChange the "
                    "program so that every rank enters the collectives of its groups in the same "
                    "order."
                )
        # overwritten, not deleted: a reader would wait for a missing key
        if published:
            self.store.set(f"waits/{self.rank}", json.dumps(None))

    def _find_cycle(self, path: Sequence[int]) -> dict[int, str] | None:
        """Return a cycle of ranks that wait for each other, from this rank back to it, with their
        collectives; `path`: the ranks so far.

        A rank's entry may be slightly old, but it still waits for the ranks that the store lacks.
        """
        key = f"waits/{path[-1]}"
        waits = json.loads(self.store.get(key)) if self.store.check([key]) else None
        if waits is None:
            return None
        for rank in waits["absent"]:
            if self.store.check([f"{waits['channel']}/{waits['number']}/{rank}"]):
                continue
            if rank == path[0]:
                return {path[-1]: waits["text"]}
            rest = self._find_cycle([*path, rank]) if rank not in path else None
            if rest is not None:
                return {path[-1]: waits["text"], **rest}
        return None

    def _raise_mismatch(self, fingerprints: Mapping[int, Fingerprint], what: str) -> NoReturn:
        """Raise an error with the collective of each rank; equal ones share a line."""
        shared: dict[str, list[str]] = {}
        for rank, fields in fingerprints.items():
            shared.setdefault(str(fields["text"]), []).append(self.where(rank))
        lines = "\n".join(
            f"  rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {t}" for t, ranks in shared.items()
        )
        raise CollectiveError(
            f"ranks {list(fingerprints)} are about to start different operations as "
            f"{what}:\n{lines}\nChange the program so that they enter the same operations, with "
            "the same shapes and dtypes, in the same order."
        )


def fingerprint(entry: CollectiveRecord) -> Fingerprint:
    """Return what has to be equal on all ranks of a collective."""
    site = f"{short_path(entry.site[0])}:{entry.site[1]}"
    rows = None if entry.rows is None else [list(part) for part in entry.rows]
    shape = None if entry.shape is None else list(entry.shape)
    return {
        "op": entry.op,
        "axes": list(entry.axes),
        "shape": shape,
        "dtype": entry.dtype,
        "site": site,
        "rows": rows,
        "text": entry.describe(),
    }


def fingerprints_match(fingerprints: Mapping[int, Fingerprint], ranks: Sequence[int]) -> bool:
    """Return whether the fingerprints of `ranks`, in group order, match.

    If ranks exchange uneven parts, each must send every other rank as many rows as that rank
    expects.
    """
    first = fingerprints[ranks[0]]
    equal_fields = ("op", "axes", "shape", "dtype", "site")
    if any(
        fields[name] != first[name] for fields in fingerprints.values() for name in equal_fields
    ):
        return False
    if first["rows"] is None:
        return True
    sent, received = ([fingerprints[rank]["rows"][side] for rank in ranks] for side in (0, 1))
    return all(sent[i][j] == received[j][i] for i in range(len(ranks)) for j in range(len(ranks)))


def _key(entry: CollectiveRecord, rank: int) -> str:
    return f"{entry.lane}/{entry.number}/{rank}"
