"""Markers of readers, which retention honors, and the lease of a folder in a store."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalith import storage
from megalith.checkpoint import lease, readers
from megalith.checkpoint.commit import Retention, remove_leftovers
from megalith.checkpoint.lease import LEASE, acquire_lease
from megalith.checkpoint.lock import SILENT_S, lock_run
from megalith.checkpoint.readers import list_being_read, mark_reading
from megalith.errors import CheckpointError
from megalith.object_store import create_object, parse_url
from megalith.storage import StoragePath
from megalith.testing.object_store import SimulatedStore, use_store

RETENTION = Retention(1)


def save_steps(folder: StoragePath, tiny: SimpleNamespace) -> None:
    for step in (1, 2, 3):
        tiny.save_alone(folder, step, roles=("param",))


def deleted(folder: StoragePath) -> list[str]:
    return [path.name for path in RETENTION.delete_old(folder)]


def test_checkpoint_that_is_read_is_not_deleted(tmp_path: Path, tiny: SimpleNamespace) -> None:
    with use_store(SimulatedStore()):
        for folder in (tmp_path / "run", parse_url("sim://bucket/run")):
            save_steps(folder, tiny)
            with mark_reading(folder / "step_0000002"):
                assert list_being_read(folder) == {"step_0000002"}
                assert deleted(folder) == ["step_0000001"]
            assert list_being_read(folder) == set()
            assert deleted(folder) == ["step_0000002"]
            assert storage.list_names(folder) == ["latest", "step_0000003"]


def test_marker_is_renewed_and_stale_ones_are_ignored_and_removed(
    tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "RENEW_S", 0.01)
    save_steps(tmp_path, tiny)
    with mark_reading(tmp_path / "step_0000001"):
        (marker,) = tmp_path.glob(".reading-*")
        marker.unlink()
        deadline = time.monotonic() + 30
        while not marker.exists():
            assert time.monotonic() < deadline, "the marker was not renewed"
            time.sleep(0.01)
    marker.write_text(json.dumps({"checkpoint": "step_0000001", "renewed": 0}))
    assert list_being_read(tmp_path) == {"step_0000001"}  # by the clock of the disk
    then = time.time() - SILENT_S - 1
    os.utime(marker, (then, then))
    (tmp_path / ".reading-12345678").write_text("no marker")
    assert list_being_read(tmp_path) == set()
    assert deleted(tmp_path) == ["step_0000001", "step_0000002"]
    remove_leftovers(tmp_path)
    assert not marker.exists()


def test_stale_marker_of_a_store_is_removed(tiny: SimpleNamespace) -> None:
    folder = parse_url("sim://bucket/run")
    with use_store(SimulatedStore()) as store:
        save_steps(folder, tiny)
        text = {"checkpoint": "step_0000001", "renewed": time.time() - SILENT_S - 1}
        store.objects[f"{folder}/.reading-12345678"] = json.dumps(text).encode()
        assert list_being_read(folder) == set()
        remove_leftovers(folder)
        assert not any("reading" in key for key in store.objects)


def test_reader_without_permission_to_write_reads_without_a_marker(
    tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    save_steps(tmp_path, tiny)
    monkeypatch.setattr(storage, "replace_file", forbid)
    with mark_reading(tmp_path / "step_0000001"), mark_reading(tmp_path / "weights"):
        assert list_being_read(tmp_path) == set()


# --- leases

FOLDER = parse_url("sim://bucket/run")


def change_lease(store: SimulatedStore, **changes: Any) -> None:
    """Change fields of the lease, or of its holder."""
    key = f"{FOLDER}/{LEASE}"
    raw = json.loads(store.objects[key])
    for name, value in changes.items():
        (raw if name in raw else raw["holder"])[name] = value
    store.objects[key] = json.dumps(raw).encode()


@pytest.mark.parametrize("is_conditional", [True, False])
def test_second_run_with_the_same_url_is_rejected(
    tmp_path: Path, is_conditional: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with use_store(SimulatedStore(has_conditional_requests=is_conditional)) as store:
        with lock_run(tmp_path / "a") as lock:
            lock.add_lease(acquire_lease(FOLDER, tmp_path / "a"))
            lock.check()
            with lock_run(tmp_path / "b"), pytest.raises(CheckpointError) as caught:
                acquire_lease(FOLDER, tmp_path / "b")
            assert str(caught.value) == (
                f"{FOLDER} is being written by process {os.getpid()} on {lock.holder.host} (run "
                f"{tmp_path}/a). Stop that run, or set checkpoint.folder to another URL. (lease: "
                f"{FOLDER}/{LEASE})"
            )
        assert store.objects == {}
        with acquire_lease(FOLDER, None):
            assert [*store.objects] == [f"{FOLDER}/{LEASE}"]
    assert ("sim:// has no conditional requests" in caplog.text) != is_conditional


def test_lease_of_a_run_that_has_ended_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease, "OBSERVE_S", 0.01)
    with use_store(SimulatedStore()) as store:
        (tmp_path / "a").mkdir()
        held = acquire_lease(FOLDER, tmp_path / "a")
        for changes in (
            {"started": "0"},  # this machine, another process
            {"machine": "another boot", "renewed": time.time() - SILENT_S - 1},
            {"machine": "another boot", "inode": (tmp_path / "a").stat().st_ino},
        ):
            change_lease(store, **changes)
            own_folder = tmp_path / ("a" if "inode" in changes else "b")
            own_folder.mkdir(exist_ok=True)
            caplog.clear()
            with acquire_lease(FOLDER, own_folder) as taken:
                assert f"taking over the lease of {FOLDER} from process {os.getpid()}" in (
                    caplog.text
                )
                taken.check()
                with pytest.raises(CheckpointError) as caught:
                    held.check()
                assert "this run lost its lease; lease.json now names process" in str(caught.value)
                store.objects[f"{FOLDER}/{LEASE}"] = b"{}"
                with pytest.raises(CheckpointError, match=r"lease\.json was deleted\. Only"):
                    taken.check()
            held.release()
            store.objects.clear()
            held = acquire_lease(FOLDER, tmp_path / "a")
        held.release()


def test_lease_of_another_machine_is_not_taken_over_while_it_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with use_store(SimulatedStore()) as store, acquire_lease(FOLDER, None):
        change_lease(store, machine="another boot", renewed=time.time() - 40)
        with pytest.raises(CheckpointError, match=r"renewed 40 s ago.*run this again in \d+ s"):
            acquire_lease(FOLDER, tmp_path)
        change_lease(store, renewed=time.time() - 1000)  # its clock differs
        monkeypatch.setattr(
            lease.time, "sleep", lambda seconds: change_lease(store, renewed=time.time() - 990)
        )
        with pytest.raises(CheckpointError, match=r"renewed just now\. Stop that run, or set"):
            acquire_lease(FOLDER, tmp_path)


def test_lease_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    with use_store(SimulatedStore()) as store, acquire_lease(FOLDER, None):
        first = store.objects[f"{FOLDER}/{LEASE}"]
        deadline = time.monotonic() + 30
        while store.objects[f"{FOLDER}/{LEASE}"] == first:
            assert time.monotonic() < deadline, "the lease was not renewed"
            time.sleep(0.01)


def test_object_is_created_once(tmp_path: Path) -> None:
    path = parse_url(f"local://{tmp_path}/store/object")
    assert create_object(path, b"first") and not create_object(path, b"second")
    assert storage.read_bytes(path) == b"first"
