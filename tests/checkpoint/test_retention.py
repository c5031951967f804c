"""Exactly the promised checkpoints stay, and what a dead run left goes."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalith import storage
from megalith.checkpoint import commit
from megalith.checkpoint.load import find_latest, verify_checkpoint


def save_steps(folder: Path, tiny: SimpleNamespace, *steps: int) -> None:
    for step in steps:
        tiny.save_alone(folder, step, roles=("param",))


def steps(folder: Path) -> list[int]:
    return [int(name[5:]) for name in storage.list_names(folder) if name.startswith("step_")]


@pytest.mark.parametrize(
    "keep,keep_every,left",
    [
        (1, None, [250]),
        (2, 100, [100, 200, 250]),
        (2, 250, [200, 250]),
        (9, None, [50, 100, 150, 200, 250]),
        (None, None, [50, 100, 150, 200, 250]),
        (None, 100, [50, 100, 150, 200, 250]),
    ],
)
def test_newest_checkpoints_and_multiples_are_kept(
    tmp_path: Path, tiny: SimpleNamespace, keep: int | None, keep_every: int | None, left: list[int]
) -> None:
    save_steps(tmp_path, tiny, 50, 100, 150, 200, 250)
    removed = commit.Retention(keep, keep_every).delete_old(tmp_path)
    assert steps(tmp_path) == left
    assert len(removed) == 5 - len(left)
    assert commit.Retention(keep, keep_every).delete_old(tmp_path) == [], "once is enough"


def test_last_checkpoint_before_skipped_steps_is_not_deleted(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    for step, last_update in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 2)):
        tiny.save_alone(tmp_path, step, roles=("param",), keep=2, last_update=last_update)
    assert steps(tmp_path) == [2, 4, 5]
    tiny.save_alone(tmp_path, 6, roles=("param",), keep=2, last_update=6)
    assert steps(tmp_path) == [5, 6], "after an update it is like any other"


def test_damaged_checkpoint_is_not_counted_and_not_deleted(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    save_steps(tmp_path, tiny, 1, 2, 3)
    os.truncate(tmp_path / "step_0000003" / "__0_0.distcp", 3)
    commit.Retention(1).delete_old(tmp_path)
    assert steps(tmp_path) == [2, 3]
    latest = find_latest(tmp_path)
    assert latest == tmp_path / "step_0000002" and verify_checkpoint(latest) == []


def test_damaged_checkpoint_that_was_set_aside_does_not_count_for_retention(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    save_steps(tmp_path, tiny, 1, 2, 3)
    damaged = tmp_path / "step_0000003"
    assert commit.set_aside_damaged(damaged) == tmp_path / "step_0000003.damaged"
    assert (tmp_path / "latest").read_text() == "step_0000002\n"
    save_steps(tmp_path, tiny, 3)
    assert commit.set_aside_damaged(damaged) == tmp_path / "step_0000003.damaged-2"
    commit.Retention(1).delete_old(tmp_path)
    assert storage.list_names(tmp_path) == [
        "latest",
        "step_0000002",
        "step_0000003.damaged",
        "step_0000003.damaged-2",
    ]


def test_pinned_and_linked_checkpoints_are_kept(tmp_path: Path, tiny: SimpleNamespace) -> None:
    save_steps(tmp_path / "elsewhere", tiny, 1)
    save_steps(tmp_path / "here", tiny, 2, 3, 4)
    (tmp_path / "here" / "step_0000001").symlink_to(tmp_path / "elsewhere" / "step_0000001")
    (tmp_path / "here" / "step_0000002" / commit.PIN).touch()
    commit.Retention(1).delete_old(tmp_path / "here")
    assert steps(tmp_path / "here") == [1, 2, 4]
    assert steps(tmp_path / "elsewhere") == [1]


def test_failing_to_delete_is_a_warning_and_the_next_call_tries_again(
    tmp_path: Path,
    tiny: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save_steps(tmp_path, tiny, 1, 2)

    def refuse(*_: object) -> None:
        raise OSError(16, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "rename", refuse)
        assert commit.Retention(1).delete_old(tmp_path) == []
    assert f"could not delete the old checkpoint {tmp_path}/step_0000001: [Errno 16]" in caplog.text
    assert commit.Retention(1).delete_old(tmp_path) == [tmp_path / "step_0000001"]


def test_leftovers_of_killed_saves_are_removed(
    tmp_path: Path, tiny: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, tiny, 1)
    for name in (
        "step_0000002.tmp-0123abcd",
        "step_0000001.old-0123abcd",
        "step_0000000.trash-0123abcd",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"x")
    for name in ("notes.tmp-0123abcd", "step_0000009", "step_0000003.tmp-mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "latest.tmp-77").touch()
    dealt_with = commit.remove_leftovers(tmp_path)
    assert sorted(path.name for path in dealt_with) == [
        "step_0000000.trash-0123abcd",
        "step_0000001.old-0123abcd",
        "step_0000002.tmp-0123abcd",
    ]
    assert storage.list_names(tmp_path) == [
        "latest",
        "notes.tmp-0123abcd",
        "step_0000001",
        "step_0000003.tmp-mine",
        "step_0000009",
    ]
    assert "step_0000002.tmp-0123abcd, left by an interrupted save" in caplog.text
    assert commit.remove_leftovers(tmp_path / "nowhere") == []


def test_an_overwrite_killed_between_its_renames_is_undone(
    tmp_path: Path, tiny: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, tiny, 1, 2)
    os.rename(tmp_path / "step_0000002", tmp_path / "step_0000002.old-0123abcd")
    assert find_latest(tmp_path) == tmp_path / "step_0000002.old-0123abcd", "before the sweep too"
    commit.remove_leftovers(tmp_path)
    assert find_latest(tmp_path) == tmp_path / "step_0000002"
    assert f"recovered {tmp_path}/step_0000002 from an interrupted overwrite" in caplog.text


def test_pointer_is_corrected_by_remove_leftovers(
    tmp_path: Path, tiny: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, tiny, 1, 2, 3)
    (tmp_path / "step_0000003" / "manifest.json").unlink()
    commit.remove_leftovers(tmp_path)
    assert (tmp_path / "latest").read_text() == "step_0000002\n"
    assert f"{tmp_path}/latest named 'step_0000003'; corrected to step_0000002" in caplog.text
    for text in ("", "\xff\n", None):
        (tmp_path / "latest").unlink() if text is None else (tmp_path / "latest").write_text(text)
        commit.remove_leftovers(tmp_path)
        assert (tmp_path / "latest").read_text() == "step_0000002\n"
    caplog.clear()
    commit.remove_leftovers(tmp_path)
    assert caplog.text == "", "once is enough"


def test_unwritable_pointer_is_a_warning(
    tmp_path: Path,
    tiny: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save_steps(tmp_path, tiny, 1)
    (tmp_path / "latest").unlink()

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(storage, "replace_file", refuse)
    assert commit.remove_leftovers(tmp_path) == []
    assert "could not be corrected ([Errno 30] Read-only file system)" in caplog.text
    assert find_latest(tmp_path) == tmp_path / "step_0000001"
