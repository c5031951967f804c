"""Checkpoints in object stores: every fault is survived or reported, and a crash after any call
leaves the older or the newer checkpoint, bit for bit."""

import itertools
import logging
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from megalith import object_store, storage
from megalith.checkpoint import manifest
from megalith.checkpoint.commit import remove_leftovers, set_aside_damaged
from megalith.checkpoint.load import find_latest, open_checkpoint, verify_checkpoint
from megalith.checkpoint.manifest import list_complete_checkpoints, step_folders
from megalith.errors import CheckpointError
from megalith.object_store import StoreOptions, StorePath, parse_url
from megalith.parallel.group import Group, single_rank_group
from megalith.testing.object_store import Fault, SimulatedCrash, SimulatedStore, use_store

FOLDER = parse_url("sim://bucket/run")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upload objects in parts that tiny models have several of."""
    monkeypatch.setattr(object_store, "PART_NBYTES", 6000)
    monkeypatch.setattr(storage, "MAX_OBJECT_NBYTES", 10000)


def load(path: storage.StoragePath, tiny: SimpleNamespace) -> dict[str, torch.Tensor]:
    """Load all tensors of a checkpoint on one rank."""
    entries = tiny.cut(tiny.model(), 1, 1, blank=True)[0]
    open_checkpoint(path).load_into(entries, single_rank_group("world"))
    return {entry.key: entry.tensor for entry in entries}


def is_model(tensors: dict[str, torch.Tensor], seed: int, tiny: SimpleNamespace) -> bool:
    """Return whether the tensors are those of the model of a seed, bit for bit."""
    entries = tiny.cut(tiny.model(seed), 1, 1)[0]
    return all(torch.equal(tensors[entry.key], entry.tensor) for entry in entries)


def check_newest(step: int, seed: int, tiny: SimpleNamespace) -> storage.StoragePath:
    """Check the newest checkpoint, and return its path."""
    path = find_latest(FOLDER)
    assert path is not None and open_checkpoint(path).step == step
    assert is_model(load(path, tiny), seed, tiny) and verify_checkpoint(path) == []
    return path


def test_save_overwrite_and_retention_in_a_store(tiny: SimpleNamespace) -> None:
    with use_store(SimulatedStore()) as store:
        report = tiny.save_alone(FOLDER, 1, seed=1)
        assert str(report.path) == "sim://bucket/run/step_0000001"
        assert store.objects["sim://bucket/run/latest"] == b"step_0000001\n"
        # Several objects of limited size, and the manifest after all of them.
        names = [key.rpartition("/")[2] for key in store.objects]
        assert sum(name.endswith(".distcp") for name in names) > 1
        assert names.index("manifest.json") == len(names) - 2  # before latest
        check_newest(1, 1, tiny)

        again = tiny.save_alone(FOLDER, 1, seed=2).path
        revision = manifest.parse_step_name(again.name)
        assert revision is not None and revision[0] == 1 and revision[1] > 0
        assert check_newest(1, 2, tiny) == again
        third = tiny.save_alone(FOLDER, 1, seed=3).path
        assert third.name > again.name and check_newest(1, 3, tiny) == third
        assert storage.list_names(FOLDER) == ["latest", third.name]  # older saves are deleted

        for step in (2, 3, 4):
            removed = tiny.save_alone(FOLDER, step, seed=step, keep=2).removed
        assert list(removed) == [FOLDER / "step_0000002"]
        assert storage.list_names(FOLDER) == ["latest", "step_0000003", "step_0000004"]
        storage.write_new(FOLDER / "step_0000003" / ".keep", b"")  # pinned
        tiny.save_alone(FOLDER, 5, seed=5, keep=1)
        assert list(list_complete_checkpoints(FOLDER)) == [3, 5]


def test_any_layout_loads_from_a_store(tiny: SimpleNamespace) -> None:
    with use_store(SimulatedStore()):
        ranks = tiny.cut(tiny.model(7), 2, 2)
        path = tiny.save(FOLDER, 3, ranks)
        assert is_model(load(FOLDER / path.name, tiny), 7, tiny)


EVERY: dict[str, tuple[Fault, str, int, int]] = {
    # name: fault, kind of call, number of the first such call, number of calls
    "error of an upload": ("error", "put", 0, 1),
    "errors of an upload": ("error", "put", 2, 3),
    "throttled upload": ("throttle", "put", 1, 5),
    "throttled listing": ("throttle", "list", 1, 2),
    "error of the first part": ("error", "part", 0, 1),
    "error of the second part": ("error", "part", 1, 1),
    "error when an upload begins": ("error", "begin", 0, 2),
    "lost upload": ("lost", "put", 0, 1),
    "lost completion": ("lost", "complete", 0, 1),
    "completion lost twice": ("lost", "complete", 0, 2),
    "doubled completion": ("doubled", "complete", 0, 1),
    "lost response of an upload": ("error after effect", "put", 1, 1),
    "lost response of a completion": ("error after effect", "complete", 1, 1),
    "truncated upload": ("truncated", "put", 0, 1),
    "lost part": ("lost", "part", 0, 1),
    "error of a request by name": ("error", "count", 0, 3),
    "cut read": ("cut", "read", 2, 1),
    "cut reads": ("cut", "read", 1, 4),
    "bit flipped while reading": ("flipped", "read", 8, 1),
    "error of a read": ("error", "read", 1, 2),
    "credentials expire between two parts": ("expired", "part", 1, 1),
    "credentials expire before a deletion": ("expired", "delete", 0, 1),
    "error of a deletion": ("error", "delete", 0, 2),
    "stale listing": ("stale", "list", 0, 2),
    "stale listings": ("stale", "list", 1, 3),
}


@pytest.mark.parametrize("name", EVERY)
def test_fault_of_a_store_is_survived(
    name: str, tiny: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    fault, kind, first, count = EVERY[name]
    numbers = itertools.count()
    hits = []

    def find_fault(number: int, each: str, key: str) -> Fault | None:
        if each != kind or not first <= next(numbers) < first + count:
            return None
        hits.append(key)
        return fault

    with use_store(SimulatedStore()) as store:
        tiny.save_alone(FOLDER, 1, seed=1)
        with use_store(SimulatedStore(dict(store.objects), find_fault)) as store:
            tiny.save_alone(FOLDER, 1, seed=2)
            tiny.save_alone(FOLDER, 2, seed=3, keep=1)
            check_newest(2, 3, tiny)
            assert len(hits) == count, hits
            assert not store.uploads, "uploads that were neither completed nor aborted"
            store.find_fault = lambda number, kind, key: None
            remove_leftovers(FOLDER)
            check_newest(2, 3, tiny)
            assert store.num_reconnects == (fault == "expired")


def test_latency_does_not_fail_a_save_and_a_hanging_call_is_repeated(
    tiny: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    folder = parse_url("sim://bucket/run", StoreOptions(retries=0, timeout_seconds=0.05))
    with use_store(SimulatedStore(find_fault=lambda n, kind, key: "hang" if n == 4 else None)):
        with pytest.raises(CheckpointError, match=r"(?s)no response within 0 s.*is none yet"):
            tiny.save_alone(folder, 1)


@pytest.mark.parametrize(
    "fault, text",
    [
        ("error", "failed 3 times in 0 s, the last time with StoreError: 500 Internal"),
        ("throttle", "failed 3 times in 0 s, the last time with StoreError: 503 Slow Down"),
        ("forbidden", "is not permitted .PermissionError: 403 Forbidden"),
        ("expired", "failed 3 times.*the provided token has expired"),
        ("lost", "the object is missing after its upload"),
    ],
)
def test_permanent_fault_fails_the_save_and_keeps_the_earlier_checkpoint(
    fault: Fault, text: str, tiny: SimpleNamespace
) -> None:
    folder = parse_url("sim://bucket/run", StoreOptions(retries=2))

    def find_fault(number: int, kind: str, key: str) -> Fault | None:
        return fault if kind in ("put", "complete") and "step_0000002/s" in key else None

    with use_store(SimulatedStore()) as store:
        tiny.save_alone(folder, 1, seed=1)
        before = dict(store.objects)
        store.find_fault = find_fault
        with pytest.raises(CheckpointError, match=text) as caught:
            tiny.save_alone(folder, 2, seed=2)
        assert "step 2 was not saved to sim://bucket/run." in str(caught.value)
        assert "state.json" in str(caught.value)
        assert "the newest is step_0000001" in str(caught.value)
        assert store.objects == before and not store.uploads
        check_newest(1, 1, tiny)


def test_causes_of_repeated_requests_are_logged_once(
    tiny: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    object_store._log_cause_once.cache_clear()
    caplog.set_level(logging.WARNING)
    numbers = itertools.count()

    def throttle_often(number: int, kind: str, key: str) -> Fault | None:
        return "throttle" if kind == "put" and next(numbers) % 3 else None

    with use_store(SimulatedStore(find_fault=throttle_often)):
        tiny.save_alone(FOLDER, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "sim://bucket: writing an object failed with StoreError: 503 Slow Down: reduce your "
        "request rate; repeating it (logged once)"
    ]


def test_damage_in_a_store_is_found_and_set_aside(tiny: SimpleNamespace) -> None:
    with use_store(SimulatedStore()) as store:
        tiny.save_alone(FOLDER, 1, seed=1)
        newest = tiny.save_alone(FOLDER, 2, seed=2).path
        key = next(key for key in store.objects if "step_0000002/__0_1" in key)
        store.objects[key] = store.objects[key][:50] + b"\x01" + store.objects[key][51:]
        with pytest.raises(CheckpointError, match=r"__0_1.*damaged. SHA-256 expected"):
            load(newest, tiny)
        aside = set_aside_damaged(newest)
        assert str(aside) == "sim://bucket/run/step_0000002/manifest.damaged.json"
        check_newest(1, 1, tiny)
        remove_leftovers(FOLDER)
        assert storage.exists(aside)  # kept for inspection
        assert tiny.save_alone(FOLDER, 2, seed=3).path.name.startswith("step_0000002.r")
        check_newest(2, 3, tiny)


def test_missing_object_is_reported_and_an_old_listing_does_not_hide_the_newest(
    tiny: SimpleNamespace,
) -> None:
    with use_store(SimulatedStore()) as store:
        tiny.save_alone(FOLDER, 1, seed=1)
        objects = dict(store.objects)
        tiny.save_alone(FOLDER, 2, seed=2)
        stale = SimulatedStore(objects, lambda n, kind, key: "stale" if kind == "list" else None)
        stale.objects = dict(store.objects)
        with use_store(stale):
            check_newest(2, 2, tiny)
        del store.objects["sim://bucket/run/step_0000002/__0_0.distcp"]
        assert verify_checkpoint(FOLDER / "step_0000002")[0].startswith(
            "sim://bucket/run/step_0000002/__0_0.distcp: cannot be read (no such object or bucket)"
        )


def crash_states(
    objects: dict[str, bytes], work: Callable[[], object]
) -> Iterator[tuple[str, SimulatedStore]]:
    """Run some work on a store, and yield the distinct stores that a crash leaves at each call,
    and the store after the last one."""
    with use_store(SimulatedStore(dict(objects))) as store:
        work()
    states = []
    for number, call in enumerate(store.calls):

        def crash(n: int, kind: str, key: str, number: int = number) -> Fault | None:
            return "crash" if n == number else None

        with use_store(SimulatedStore(dict(objects), crash)) as crashed:
            with pytest.raises(SimulatedCrash):
                work()
        states.append((f"before call {number} {call}", crashed))
    previous: dict[str, bytes] | None = None
    for label, crashed in [*states, ("at the end", store)]:
        if _by_kind(crashed.objects) != previous:
            previous = _by_kind(crashed.objects)
            yield label, SimulatedStore(crashed.objects)


def _by_kind(objects: dict[str, bytes]) -> dict[str, bytes]:
    """Return the objects with the same name for all new revisions."""
    return {re.sub(r"\.r[0-9a-f]{8}", ".r", key): data for key, data in objects.items()}


def recover(label: str, allowed: dict[int, list[int]], tiny: SimpleNamespace) -> tuple[int, int]:
    """Open the store as the next start does, and return the newest (step, seed); `allowed`: seeds
    of each step that it may have."""
    remove_leftovers(FOLDER)
    path = find_latest(FOLDER)
    assert path is not None, label
    step, tensors = open_checkpoint(path).step, load(path, tiny)
    seeds = [seed for seed in allowed.get(step, []) if is_model(tensors, seed, tiny)]
    assert len(seeds) == 1, f"{label}: step {step}"
    assert manifest.read_pointer(FOLDER) == path.name, label
    complete = {each.name for each in list_complete_checkpoints(FOLDER).values()}
    assert set(storage.list_names(FOLDER)) == {*complete, "latest"}, label  # no other objects
    return step, seeds[0]


@pytest.mark.parametrize("kind", ["save", "overwrite", "retention", "second overwrite"])
def test_crash_after_any_call_leaves_the_older_or_the_newer_checkpoint(
    kind: str, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "PART_NBYTES", 10**6 if kind == "retention" else 9000)
    with use_store(SimulatedStore()) as store:
        for step in (1, 2):
            tiny.save_alone(FOLDER, step, seed=step)
        if kind == "second overwrite":
            tiny.save_alone(FOLDER, 2, seed=2)
    older = (2, 2)
    step, keep, allowed = {
        "save": (3, None, {2: [2], 3: [9]}),
        "retention": (3, 1, {2: [2], 3: [9]}),
        "overwrite": (2, None, {2: [2, 9]}),
        "second overwrite": (2, None, {2: [2, 9]}),
    }[kind]
    results = []
    for label, crashed in crash_states(
        store.objects, lambda: tiny.save_alone(FOLDER, step, seed=9, keep=keep)
    ):
        with use_store(crashed):
            results.append(recover(label, allowed, tiny))
            assert is_model(load(step_folders(FOLDER)[results[-1][0]], tiny), results[-1][1], tiny)
    # Older until the manifest is stored, then newer.
    change = results.index((step, 9))
    assert results[:change] == [older] * change and results[change:] == [(step, 9)] * (
        len(results) - change
    )
    assert 0 < change < len(results)


def test_crash_of_the_cleanup_or_while_setting_aside_keeps_a_checkpoint(
    tiny: SimpleNamespace,
) -> None:
    with use_store(SimulatedStore()) as store:
        tiny.save_alone(FOLDER, 1, seed=1)
        tiny.save_alone(FOLDER, 2, seed=2)
        objects = dict(store.objects)
        tiny.save_alone(FOLDER, 2, seed=3)
        revision = {key: data for key, data in store.objects.items() if ".r" in key}
    left = objects | revision | {"sim://bucket/run/step_0000003/__0_0.distcp": b"incomplete"}
    for label, crashed in crash_states(left, lambda: remove_leftovers(FOLDER)):
        with use_store(crashed):
            assert recover(label, {2: [3]}, tiny) == (2, 3)
    for label, crashed in crash_states(objects, lambda: set_aside_damaged(FOLDER / "step_0000002")):
        with use_store(crashed):
            remove_leftovers(FOLDER)
            path = find_latest(FOLDER)
            assert path is not None, label
            assert open_checkpoint(path).step in (1, 2)


def test_two_ranks_save_to_a_store(
    tiny: SimpleNamespace, run_threads: Callable[..., list[object]]
) -> None:
    from megalith.checkpoint.save import save_checkpoint

    ranks = tiny.cut(tiny.model(4), 1, 2)

    def save(world: Group) -> StorePath:
        report = save_checkpoint(
            FOLDER, 6, ranks[world.rank], {"step": 6}, world, config_text="name: tiny\n"
        )
        assert isinstance(report.path, StorePath)
        return report.path

    with use_store(SimulatedStore()):
        tiny.save_alone(FOLDER, 6, seed=1)
        paths = run_threads(2, save)
        assert paths[0] == paths[1] and ".r" in str(paths[0])
        check_newest(6, 4, tiny)
