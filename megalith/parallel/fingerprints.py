"""parallel.check_collectives: before every collective, the ranks of its group compare what they are
about to do.

A rank that calls another operation, or brings another shape, makes the others wait forever or,
worse, sum the wrong numbers. Here each rank first writes a fingerprint into the store of the ranks
and reads those of its peers. That costs a few round trips to the store per collective, so it is for
finding a fault, not for training.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch._C._distributed_c10d import Store

from megalith.errors import CollectiveError
from megalith.observe.flight import CollectiveRecord, axes_name, short_path
from megalith.parallel.watch import wait_for

PATIENCE_SECONDS = 1.0
"""Time after which ranks that do not come are suspected of waiting for this one."""

Fingerprint = Mapping[str, Any]  # Any: JSON


class Fingerprints:
    """Compares what this rank enters with what its peers enter, and finds ranks that wait for each
    other."""

    def __init__(self, store: Store, rank: int, where: Callable[[int], str] = str) -> None:
        self.store, self.rank, self.where = store, rank, where

    def compare(self, entry: CollectiveRecord) -> None:
        """Return when every rank of the group is about to do the same.

        A message is compared by whichever end comes second, so that it may be sent before anybody
        waits for it.

        Raises:
            CollectiveError: on every rank of the group, with what each of them is about to do; or
                the ranks wait for each other in different collectives.
        """
        if entry.peer is not None:
            self._compare_message(entry, entry.peer)
            return
        self.store.set(_key(entry, self.rank), json.dumps(fingerprint(entry)))
        if (
            entry.number >= 2
        ):  # all have come to the one before, so nobody will read the one before that
            self.store.delete_key(f"{entry.lane}/{entry.number - 2}/{self.rank}")
        self._wait_for_all(entry)
        found = {rank: json.loads(self.store.get(_key(entry, rank))) for rank in entry.ranks}
        if not fingerprints_match(found, entry.ranks):
            what = f"number {entry.number} over {axes_name(entry.axes)}"
            self._refuse(found, what)

    def _compare_message(self, entry: CollectiveRecord, peer: int) -> None:
        group, sends = entry.lane.rsplit(" ", 2)[0], entry.op == "send"
        ends = (self.rank, peer) if sends else (peer, self.rank)
        keys = [f"{group}/{ends[0]} to {ends[1]}/{entry.number}/{end}" for end in ends]
        mine, theirs = keys if sends else reversed(keys)
        arrivals = f"{group}/{ends[0]} to {ends[1]}/{entry.number}"
        self.store.set(mine, json.dumps(fingerprint(entry)))
        if (
            self.store.add(arrivals, 1) == 1
        ):  # counted after it was written: whoever is second finds both
            return
        found = {self.rank: fingerprint(entry), peer: json.loads(self.store.get(theirs))}
        for key in (*keys, arrivals):
            self.store.delete_key(key)
        if any(found[self.rank][name] != found[peer][name] for name in ("shape", "dtype")):
            self._refuse(found, f"message {entry.number} between them")

    def _wait_for_all(self, entry: CollectiveRecord) -> None:
        keys = [_key(entry, rank) for rank in entry.ranks]
        told_of = False
        suspected: dict[int, str] | None = None
        while not wait_for(
            self.store, keys, PATIENCE_SECONDS
        ):  # a rank that is only slow is left to the timeout
            absent = [
                rank
                for rank, key in zip(entry.ranks, keys, strict=True)
                if not self.store.check([key])
            ]
            waits = {
                "text": entry.describe(),
                "lane": entry.lane,
                "number": entry.number,
                "absent": absent,
            }
            self.store.set(f"waits/{self.rank}", json.dumps(waits))
            told_of, before, suspected = True, suspected, self._circle([self.rank])
            # Seen twice: what ranks write while they are looked at may look like a circle once.
            if suspected is not None and suspected == before:
                told = "\n".join(
                    f"  rank {self.where(rank)}: {text}" for rank, text in suspected.items()
                )
                raise CollectiveError(
                    f"ranks wait for each other, each in another collective:\n{told}\nEvery rank "
                    "must be made to "
                    "enter the collectives of its groups in the same order: look at what made "
                    "these differ."
                )
        if (
            told_of
        ):  # overwritten: whoever is about to read it would wait for a key that was deleted
            self.store.set(f"waits/{self.rank}", json.dumps(None))

    def _circle(self, path: Sequence[int]) -> dict[int, str] | None:
        """Ranks that wait for one another, from this one back to it, and in what; `path` is the way
        so far.

        What a rank wrote may be a little old. It still waits for those who have not come, which the
        store knows.
        """
        key = f"waits/{path[-1]}"
        waits = json.loads(self.store.get(key)) if self.store.check([key]) else None
        if waits is None:
            return None
        for rank in waits["absent"]:
            if self.store.check([f"{waits['lane']}/{waits['number']}/{rank}"]):
                continue
            if rank == path[0]:
                return {path[-1]: waits["text"]}
            rest = self._circle([*path, rank]) if rank not in path else None
            if rest is not None:
                return {path[-1]: waits["text"], **rest}
        return None

    def _refuse(self, found: Mapping[int, Fingerprint], what: str) -> NoReturn:
        """Say what each rank is about to do, those that agree in one line."""
        shared: dict[str, list[str]] = {}
        for rank, told in found.items():
            shared.setdefault(str(told["text"]), []).append(self.where(rank))
        lines = "\n".join(
            f"  rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {t}" for t, ranks in shared.items()
        )
        raise CollectiveError(
            f"ranks {list(found)} are about to do different things as {what}:\n{lines}\nThey must "
            "be made to enter the "
            "same operations, with the same shapes and dtypes, in the same order: look at what "
            "made these differ."
        )


def fingerprint(entry: CollectiveRecord) -> Fingerprint:
    """What has to be the same on all ranks of a collective."""
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


def fingerprints_match(found: Mapping[int, Fingerprint], ranks: Sequence[int]) -> bool:
    """Whether the fingerprints of `ranks`, in group order, fit together.

    Where ranks exchange uneven parts, each must send every other as many rows as that one expects.
    """
    first = found[ranks[0]]
    same = ("op", "axes", "shape", "dtype", "site")
    if any(told[name] != first[name] for told in found.values() for name in same):
        return False
    if first["rows"] is None:
        return True
    sent, received = ([found[rank]["rows"][side] for rank in ranks] for side in (0, 1))
    return all(sent[i][j] == received[j][i] for i in range(len(ranks)) for j in range(len(ranks)))


def _key(entry: CollectiveRecord, rank: int) -> str:
    return f"{entry.lane}/{entry.number}/{rank}"
