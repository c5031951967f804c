"""The manifest says what is there, and believes nothing it reads."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalith.checkpoint.format import (
    FORMAT,
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    dump_manifest,
    folder_name,
    manifest_digest,
    merge_tensors,
    parse_manifest,
    show_bytes,
    step_folders,
)
from megalith.errors import CheckpointError

DIGEST = "0" * 64
TEXTS = {"state.json": StoredFile(2, DIGEST), "config.yaml": StoredFile(2, DIGEST)}
MANIFEST = Manifest(
    step=100,
    world_size=2,
    tensors={
        "model.w": StoredTensor(
            (2, 3),
            "bfloat16",
            (
                StoredBox(((0, 1), (0, 3)), "__0_0.distcp", 0, 10, DIGEST),
                StoredBox(((1, 2), (0, 3)), "__1_0.distcp", 5, 15, DIGEST),
            ),
        ),
        "model.scale": StoredTensor(
            (), "float32", (StoredBox((), "__0_0.distcp", 10, 10, DIGEST),)
        ),
        "model.none": StoredTensor((0, 4), "int64", ()),
    },
    files={
        "__0_0.distcp": StoredFile(20),
        "__1_0.distcp": StoredFile(20),
        ".metadata": StoredFile(1, DIGEST),
    }
    | TEXTS,
)
PATH = Path("c/manifest.json")


def changed(change: Callable[[Any], object]) -> bytes:
    raw = json.loads(dump_manifest(MANIFEST, {}))
    change(raw)
    return json.dumps(raw).encode()


def test_manifest_round_trips_through_its_text() -> None:
    assert parse_manifest(dump_manifest(MANIFEST, {"torch": "2.13.0"}), PATH) == MANIFEST


def test_manifest_has_one_line_per_tensor_and_versions() -> None:
    lines = dump_manifest(MANIFEST, {"torch": "2.13.0"}).decode().splitlines()
    assert sum('"model.' in line for line in lines) == 3
    assert '"versions": {"torch": "2.13.0"},' in lines
    raw = json.loads("".join(lines))
    assert raw["format"] == FORMAT
    assert lines[-2] == f'"manifest_sha256": "{manifest_digest(raw)}"', (
        "old versions ignore fields that they do not know"
    )


@pytest.mark.parametrize(
    "change,reason",
    [
        (lambda m: m.pop("tensors"), "KeyError: 'tensors'"),
        (lambda m: m.update(step=-1), "-1 where a count was expected"),
        (lambda m: m.update(step=True), "True where a count was expected"),
        (lambda m: m.update(tensors=[]), "AttributeError"),
        (lambda m: m["files"].pop("state.json"), "no hash of state.json"),
        (lambda m: m["files"]["config.yaml"].pop("sha256"), "no hash of config.yaml"),
        (
            lambda m: m["files"]["config.yaml"].update(sha256="x"),
            "'x' where a SHA-256 was expected",
        ),
        (
            lambda m: m["files"].update({"../../etc/passwd": {"nbytes": 1}}),
            "'../../etc/passwd' cannot be a file",
        ),
        (
            lambda m: m["files"].update({"/etc/passwd": {"nbytes": 1}}),
            "'/etc/passwd' cannot be a file",
        ),
        (lambda m: m["files"].update({"..": {"nbytes": 1}}), "'..' cannot be a file"),
        (lambda m: m["tensors"]["model.w"].update(dtype="object"), "model.w is of dtype 'object'"),
        (
            lambda m: m["tensors"]["model.w"]["boxes"].pop(),
            r"model.w: \[1:2, 0:3\] of \[2, 3\] is not written",
        ),
        (
            lambda m: m["tensors"]["model.w"].update(shape=[1, 3]),
            r"\[1:2, 0:3\] is not inside its shape \[1, 3\]",
        ),
        (
            lambda m: m["tensors"]["model.w"]["boxes"][0].update(box=[[0, 2], [0, 3]]),
            "is written twice",
        ),
        (lambda m: m["tensors"]["model.w"]["boxes"][0].update(box=[[0, 1, 3]]), "ValueError"),
        (lambda m: m["tensors"]["model.w"]["boxes"][0].update(file="other"), "KeyError: 'other'"),
        (
            lambda m: m["tensors"]["model.w"]["boxes"][1].update(offset=6),
            "ends behind the end of __1_0.distcp",
        ),
        (lambda m: m["tensors"]["model.w"]["boxes"][1].update(nbytes=1e3), "1000.0 where a count"),
        (lambda m: m.update(manifest_sha256=None), "None where a SHA-256 was expected"),
    ],
)
def test_invalid_manifest_is_rejected(change: Callable[[Any], object], reason: str) -> None:
    with pytest.raises(
        CheckpointError, match=rf"c/manifest.json: this is not the manifest .*{reason}.*use another"
    ):
        parse_manifest(changed(change), PATH)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000])
def test_invalid_manifest_text_is_rejected(data: bytes) -> None:
    with pytest.raises(
        CheckpointError, match="c/manifest.json: this is not the manifest of a checkpoint"
    ):
        parse_manifest(data, PATH)


def test_newer_format_is_rejected() -> None:
    text = (
        rf"written in format {FORMAT + 1}, and this build reads formats up to {FORMAT}. Use a "
        rf"newer Megalith"
    )
    with pytest.raises(CheckpointError, match=text):
        parse_manifest(changed(lambda m: (m.update(format=FORMAT + 1), m.pop("tensors"))), PATH)


def test_parts_of_ranks_make_one_table() -> None:
    parts = [
        {"w": StoredTensor((2,), "float32", (StoredBox(((r, r + 1),), "f", 0, 1, DIGEST),))}
        for r in range(2)
    ]
    merged = merge_tensors([*parts, {"w": StoredTensor((2,), "float32", ())}])
    assert [box.box for box in merged["w"].boxes] == [((0, 1),), ((1, 2),)]
    with pytest.raises(
        CheckpointError, match=r"1 tensors .*\n  w: \[1:2\] of \[2\] is not written"
    ):
        merge_tensors(parts[:1])


def test_experts_that_no_rank_wrote_are_named_by_their_numbers() -> None:
    """Numbers of experts are the first dimension of their tensors, over all ranks."""
    key, shape = "model.layers.3.moe.experts.down", (8, 3, 5)
    boxes = [((first, first + 2), (0, 3), (0, 5)) for first in (0, 2, 6)]
    parts = [
        {key: StoredTensor(shape, "float32", (StoredBox(box, "f", 0, 30, DIGEST),))}
        for box in boxes
    ]
    with pytest.raises(
        CheckpointError,
        match=r"experts.down: \[4:6, 0:3, 0:5\] of \[8, 3, 5\] is not written",
    ):
        merge_tensors(parts)


def test_folders_are_found_by_step_and_one_moved_aside_stands_in(tmp_path: Path) -> None:
    for name in (
        "step_0000100",
        "step_0000020",
        "step_0000020.old-0123abcd",
        "step_10000000",
        "step_0000030.old-0123abcd",
        "step_0000040.tmp-0123abcd",
        "step_0000050.trash-0123abcd",
        "step_60",
        "latest",
        "step_0000070x",
    ):
        (tmp_path / name).mkdir()
    assert {step: path.name for step, path in step_folders(tmp_path).items()} == {
        20: "step_0000020",
        30: "step_0000030.old-0123abcd",
        100: "step_0000100",
        10**7: "step_10000000",
    }
    assert list(step_folders(tmp_path)) == [20, 30, 100, 10**7]
    assert (folder_name(100), folder_name(10**7)) == ("step_0000100", "step_10000000")


@pytest.mark.parametrize(
    "nbytes,text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1234, "1.2 kB"),
        (56_789, "57 kB"),
        (1.4e9, "1.4 GB"),
        (3e15, "3000 TB"),
    ],
)
def test_sizes_are_formatted_with_units(nbytes: float, text: str) -> None:
    assert show_bytes(nbytes) == text


def test_saved_files_match_the_format(tmp_path: Path, tiny: SimpleNamespace) -> None:
    path = tiny.save_alone(tmp_path, 1).path
    assert sorted(f.name for f in path.iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "config.yaml",
        "manifest.json",
        "state.json",
    ]
    manifest = parse_manifest((path / "manifest.json").read_bytes(), path)
    assert {name: file.nbytes for name, file in manifest.files.items()} == {
        f.name: f.stat().st_size for f in path.iterdir() if f.name != "manifest.json"
    }
