"""Where weights are written: never over or inside of others, and what a killed conversion left is
not left for ever."""

import logging
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalith import storage
from megalith.checkpoint.format import Manifest, dump_manifest
from megalith.errors import CheckpointError
from megalith.hf import staging
from megalith.hf.folder import write_folder
from megalith.hf.release import write_release
from megalith.hf.staging import check_target, find_staging_folders, prepare_staging

GONE = 2**22 + 1  # above the highest number that Linux gives a process


def left(path: Path, machine: str, process: int) -> Path:
    """What a conversion to `path` left."""
    folder = path.with_name(f".{path.name}.tmp-{machine}-{process}-0123abcd")
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"half")
    return folder


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("socket.gethostname", lambda: "node-7.rack 3")
    assert re.fullmatch(r"node_7\.rack_3\.[0-9a-f]{8}", staging._machine_id())
    return staging._machine_id()


def test_staging_folder_name_identifies_the_process(tmp_path: Path, here: str) -> None:
    first, second = prepare_staging(tmp_path / "x"), prepare_staging(tmp_path / "x")
    assert first.parent == tmp_path and first != second and not first.exists()
    assert first.name.startswith(f".x.tmp-{here}-{os.getpid()}-")
    first.mkdir()
    assert find_staging_folders(tmp_path / "x") == [(first, "gone")]


def test_staging_folders_of_ended_processes_are_removed_with_a_warning(
    tmp_path: Path, here: str, caplog: pytest.LogCaptureFixture
) -> None:
    old, other = left(tmp_path / "x", here, GONE), left(tmp_path / "xy", here, GONE)
    with caplog.at_level(logging.WARNING):
        prepare_staging(tmp_path / "x")
    assert not old.exists() and other.exists()
    assert (
        f"{old}: removed; it was left by a conversion that was killed" in caplog.text
        and "xy" not in caplog.text
    )


@pytest.mark.parametrize(("machine", "process"), [("node_8", GONE), ("", os.getppid())])
def test_staging_folders_of_running_processes_are_kept_with_a_warning(
    machine: str, process: int, tmp_path: Path, here: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = left(tmp_path / "x", machine or here, process)
    with caplog.at_level(logging.WARNING):
        prepare_staging(tmp_path / "x")
    assert (folder / "model.safetensors").read_bytes() == b"half"
    known = (
        " on another machine, or was killed. If it was killed, remove"
        if process == GONE
        else ", or a process with the same id. Remove"
    )
    assert f"{folder}: another conversion to {tmp_path / 'x'} is running{known}" in caplog.text


def test_staging_folders_without_a_process_id_are_kept(tmp_path: Path, here: str) -> None:
    folder = tmp_path / ".x.tmp-0123abcd"
    folder.mkdir()
    (tmp_path / ".x.tmp-notes").mkdir()
    assert find_staging_folders(tmp_path / "x") == [(folder, "elsewhere")]


@pytest.mark.parametrize("linux", [True, False])
def test_machines_with_equal_names_do_not_remove_each_others_folders(
    linux: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*arguments: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr("socket.gethostname", lambda: "n" * 64)
    monkeypatch.setattr("os.readlink", (lambda path: "pid:[1]") if linux else gone)
    one = staging._machine_id()
    left(tmp_path / "x", one, GONE)
    assert (
        find_staging_folders(tmp_path / "x")[0][1] == "gone"
        and staging._machine_id() == one
        and len(one) == 33
    )
    monkeypatch.setattr("os.readlink", (lambda path: "pid:[2]") if linux else gone)
    monkeypatch.setattr("uuid.getnode", lambda: 7)
    assert (
        staging._machine_id() != one and find_staging_folders(tmp_path / "x")[0][1] == "elsewhere"
    )


def test_an_existing_path_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match="already exists and is not overwritten. Choose another target, or remove",
    ):
        check_target(tmp_path)
    (tmp_path / "link").symlink_to("nothing")
    with pytest.raises(CheckpointError, match="link already exists and is not overwritten"):
        check_target(tmp_path / "link")


@pytest.mark.parametrize("name", staging.INSIDES)
def test_targets_inside_other_weights_are_rejected(name: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).write_bytes(dump_manifest(Manifest(1, 2, {}, {}), {}))
    for inside in ("x", "deep/er/x"):
        with pytest.raises(
            CheckpointError,
            match="is inside .*model, which is a checkpoint or a model",
        ):
            check_target(tmp_path / "model" / inside)
    check_target(tmp_path / "x")


def test_targets_among_the_checkpoints_of_a_run_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").touch()
    with pytest.raises(
        CheckpointError,
        match="among the checkpoints of the run .*run, which would treat it as one of them",
    ):
        check_target(tmp_path / "run" / "checkpoints" / "step_0000100")
    check_target(tmp_path / "run" / "as_hf")  # a folder of the user's, beside them


def test_both_formats_are_written_in_a_staging_folder(
    tmp_path: Path, tiny: SimpleNamespace, here: str
) -> None:
    model = tiny.folder(tmp_path / "model", tiny.config())
    weights = tiny.InMemory(tiny.tensors(model))
    begun: dict[str, Callable[..., int]] = {
        "a": write_folder,
        "b": partial(write_release, config_text=""),
    }
    for name, write in begun.items():
        with pytest.raises(CheckpointError, match="is inside"):
            write(tmp_path / "model" / "x", tiny.config(), weights)
        folder = left(tmp_path / name, here, GONE)
        write(tmp_path / name, tiny.config(), weights)
        assert (
            not folder.exists()
            and (tmp_path / name).is_dir()
            and find_staging_folders(tmp_path / name) == []
        )


def test_manifest_of_another_format_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "a page for the web", "start_url": "/"}')
    check_target(tmp_path / "models" / "x")
    (tmp_path / "manifest.json").write_text("")
    check_target(tmp_path / "models" / "x")


def test_an_unreadable_manifest_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, start: int, nbytes: int) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "manifest.json").write_text('{"name": "a page for the web"}')
    monkeypatch.setattr(storage, "read_range", refused)
    check_target(tmp_path / "models" / "x")


def test_a_target_below_a_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for inside in ("x", "deep/er/x"):
        with pytest.raises(
            CheckpointError,
            match=r"is below .*file, which is a file. Choose another target",
        ):
            prepare_staging(tmp_path / "file" / inside)


@pytest.mark.parametrize("call", ["list_names", "remove_tree"])
def test_os_errors_before_writing_become_checkpoint_errors(
    call: str, tmp_path: Path, here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    left(tmp_path / "x", here, GONE)
    monkeypatch.setattr(storage, call, refused)
    with pytest.raises(
        CheckpointError,
        match=r"x: not written \(.*Permission denied.*Choose another target, or change",
    ):
        prepare_staging(tmp_path / "x")


def test_an_inaccessible_target_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refused)
    with pytest.raises(CheckpointError, match=r"x: not written \(.*Permission denied"):
        check_target(tmp_path / "x")
