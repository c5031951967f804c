"""The journal of unfinished stores: counts only what was written, and never takes what is not its
own."""

from pathlib import Path

import numpy as np
import pytest

from megalith.data.corpus import Position, Source
from megalith.data.indexed import IndexedDataset
from megalith.data.stores import EncodedKey, PrepareJournal, Totals
from megalith.errors import DataError

SOURCES = [Source("a", "jsonl", 100, 1), Source("b", "jsonl", 100, 2)]


def journal(
    folder: Path, *, settings: str = "same", sources: list[Source] | None = None
) -> PrepareJournal:
    return PrepareJournal(
        folder / "work", ["text"], {"tokenizer": settings}, SOURCES if sources is None else sources
    )


def block(*documents: list[int]) -> EncodedKey:
    ids = np.array([token for document in documents for token in document], np.uint16)
    lengths = np.array([len(document) for document in documents if document], np.int32)
    return EncodedKey(ids, lengths, np.array([bool(document) for document in documents], np.int32))


def test_blocks_become_a_store(tmp_path: Path) -> None:
    with journal(tmp_path) as work:
        work.start(resume=False, overwrite=False)
        work.append(Position(0, 2, 10), [block([1, 2], [])], Totals(documents=2, tokens=2))
        work.append(Position(1), [block([3])], Totals(documents=1, tokens=1, rejected={"blank": 1}))
        work.finish(np.dtype("<u2"))
        work.publish([str(tmp_path / "out")])
        assert (work.totals.documents, work.totals.tokens, work.totals.rejected) == (
            3,
            3,
            {"blank": 1},
        )
    store = IndexedDataset(str(tmp_path / "out"))
    assert [store.document(n).tolist() for n in range(3)] == [[1, 2], [], [3]]
    assert not (tmp_path / "work").exists()


def interrupted(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt), journal(folder) as work:
        work.start(resume=False, overwrite=False)
        work.append(Position(1), [block([1, 2])], Totals(documents=1, tokens=2))
        raise KeyboardInterrupt


def test_interrupt_keeps_completed_blocks(tmp_path: Path) -> None:
    interrupted(tmp_path)
    with journal(tmp_path) as work:
        work.start(resume=True, overwrite=False)
        assert (work.position, work.totals.documents) == (Position(1), 1)


def test_bytes_of_an_interrupted_append_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(tmp_path)
    with pytest.raises(KeyboardInterrupt), journal(tmp_path) as work:
        work.start(resume=True, overwrite=False)
        monkeypatch.setattr(
            Totals, "__add__", lambda *both: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        work.append(Position(2), [block([7, 8, 9])], Totals(documents=1))
    monkeypatch.undo()
    with journal(tmp_path) as work:
        work.start(resume=True, overwrite=False)
        assert work.position == Position(1)
        work.append(Position(2), [block([3])], Totals(documents=1, tokens=1))
        work.finish(np.dtype("<u2"))
        work.publish([str(tmp_path / "out")])
    assert [item.tolist() for item in IndexedDataset(str(tmp_path / "out"))[:]] == [[1, 2], [3]]


def test_unfinished_work_is_kept_if_the_next_run_differs(tmp_path: Path) -> None:
    interrupted(tmp_path)
    others = [Source("a", "jsonl", 101, 1), SOURCES[1]]
    for work, options, text in (
        (
            journal(tmp_path),
            {"resume": False},
            r"contains an unfinished run\. Pass --resume to continue",
        ),
        (
            journal(tmp_path, settings="x"),
            {"resume": True},
            r"other settings or files \(tokenizer differ\)",
        ),
        (
            journal(tmp_path, sources=others),
            {"resume": True},
            r"\(the files read so far differ\)\. Use the same",
        ),
    ):
        with pytest.raises(DataError, match=text), work:
            work.start(overwrite=False, **options)
    with journal(tmp_path) as work:
        work.start(resume=True, overwrite=False)
        assert work.totals.documents == 1


def test_files_not_read_yet_may_change(tmp_path: Path) -> None:
    interrupted(tmp_path)
    with journal(tmp_path, sources=[SOURCES[0], Source("b", "jsonl", 55, 9)]) as work:
        work.start(resume=True, overwrite=False)
        assert work.position == Position(1)


def test_truncated_file_is_rejected(tmp_path: Path) -> None:
    interrupted(tmp_path)
    (tmp_path / "work" / "text.lengths").write_bytes(b"")
    with (
        pytest.raises(DataError, match=r"text\.lengths: 0 bytes, 4 expected\. Pass --overwrite"),
        journal(tmp_path) as w,
    ):
        w.start(resume=True, overwrite=False)


def test_interrupt_before_the_first_block_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), journal(tmp_path) as work:
        work.start(resume=False, overwrite=False)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_number_of_reported_examples_is_limited() -> None:
    totals = Totals()
    for number in range(9):
        totals.reject("blank", f"line {number}")
    assert totals.rejected == {"blank": 9} and len((totals + totals).examples) == 5


@pytest.mark.parametrize("resume", [False, True])
def test_work_of_a_running_process_is_not_unfinished(tmp_path: Path, resume: bool) -> None:
    with journal(tmp_path) as first:
        first.start(resume=False, overwrite=False)
        first.append(Position(1), [block([1, 2])], Totals(documents=1, tokens=2))
        with (
            pytest.raises(DataError, match=r"work: another process is writing to it .*Wait for it"),
            journal(tmp_path) as w,
        ):
            w.start(resume=resume, overwrite=False)
        first.finish(np.dtype("<u2"))
        first.publish([str(tmp_path / "out")])
    assert IndexedDataset(str(tmp_path / "out")).get(0).tolist() == [1, 2]


def test_folder_that_cannot_be_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")

    def refuse(path: Path) -> bool:  # as in a folder that may not be searched
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    with (
        pytest.raises(
            DataError, match=r"file/work: cannot be written .*Use an output in a writable folder"
        ),
        journal(tmp_path / "file") as work,
    ):
        work.start(resume=False, overwrite=False)
