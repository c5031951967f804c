"""Any layout loads what any other saved, and nothing damaged, foreign or malicious gets through."""

import hashlib
import io
import itertools
import json
import os
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import storage
from megalith.checkpoint.format import MANIFEST_SHA256, CheckpointEntry, manifest_digest
from megalith.checkpoint.load import (
    find_latest,
    list_other_checkpoints,
    open_checkpoint,
    verify_checkpoint,
)
from megalith.config.checkpoint import CheckpointConfig, KeyMismatchAction
from megalith.errors import CheckpointError, DamagedCheckpointError
from megalith.observe.machine import FORMATS
from megalith.parallel.group import Group, single_rank_group
from megalith.plan.shards import Shard
from tests.cases import loop_over

ALONE = single_rank_group("world")


class Evil:
    """Unpickled without care, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:  # as pickle has it
        return os.system, (f"touch {self.path}",)


def entries_of(tensors: dict[str, Tensor], role: str = "param") -> list[CheckpointEntry]:
    return [
        CheckpointEntry(
            Shard.full(name, tuple(tensor.shape), dtype=FORMATS[tensor.dtype]), role, tensor
        )
        for name, tensor in tensors.items()
    ]


def saved(tmp_path: Path, tiny: SimpleNamespace, entries: Sequence[CheckpointEntry]) -> Path:
    path = tiny.save(tmp_path, 100, [entries])
    assert isinstance(path, Path)
    return path


def edit_manifest(path: Path, change: Callable[[Any], object]) -> None:
    """Change the manifest and its SHA-256, so that only what it says is wrong."""
    raw = json.loads((path / "manifest.json").read_text())
    change(raw)
    raw[MANIFEST_SHA256] = manifest_digest(raw)
    (path / "manifest.json").write_text(json.dumps(raw))


def plant(path: Path, key: str, data: bytes) -> None:
    """Put other bytes where a tensor is, with a manifest that vouches for them."""
    file = path / "__0_0.distcp"
    at = file.stat().st_size

    def vouch(raw: Any) -> None:
        raw["files"][file.name]["nbytes"] = at + len(data)
        digest = hashlib.sha256(data).hexdigest()
        raw["tensors"][key]["boxes"][0] |= {"offset": at, "nbytes": len(data), "sha256": digest}

    with file.open("ab") as stream:
        stream.write(data)
    edit_manifest(path, vouch)


@pytest.mark.parametrize("before", [(1, 1), (2, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("after", [(1, 1), (3, 1), (1, 2), (2, 3)])
def test_any_layout_loads_any_layout_bitwise(
    tmp_path: Path, tiny: SimpleNamespace, before: tuple[int, int], after: tuple[int, int]
) -> None:
    model = tiny.model()
    checkpoint = open_checkpoint(tiny.save(tmp_path, 100, tiny.cut(model, *before)))
    wanted, got = tiny.cut(model, *after), tiny.cut(model, *after, blank=True)
    for entries in got:
        checkpoint.load_into(entries, ALONE)
    for a, b in zip(wanted, got, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x.tensor, y.tensor), x.key
    assert verify_checkpoint(checkpoint.path) == []


def random_shards(rng: random.Random, name: str, shape: tuple[int, ...]) -> list[Shard]:
    """Shards that tile the tensor: a random grid of boxes, some of them cut into flat ranges."""
    spans = []
    for n in shape:
        cuts = sorted({0, n, *(rng.randint(0, n) for _ in range(rng.randint(0, 2)))})
        spans.append(list(itertools.pairwise(cuts)))
    shards = []
    for box in itertools.product(*spans):
        shard = Shard(name, shape, box)
        marks = sorted(
            [0, shard.numel, *(rng.randint(0, shard.numel) for _ in range(rng.randint(0, 2)))]
        )
        flats = [None] if rng.random() < 0.5 else list(itertools.pairwise(marks))
        shards += [replace(shard, flat=flat) for flat in flats]
    return shards


def local(shard: Shard, tensor: Tensor) -> Tensor:
    box = tensor[tuple(slice(a, b) for a, b in shard.box)].reshape(-1)
    return (box if shard.flat is None else box[slice(*shard.flat)]).clone()


@loop_over("seed", range(25))
def test_random_tilings_load_as_other_random_tilings(
    tmp_path: Path, tiny: SimpleNamespace, seed: int
) -> None:
    rng = random.Random(seed)
    shapes = {f"w{i}": tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 4))) for i in range(3)}
    tensors = {
        name: tiny.values(shape, seed + i, torch.float32)
        for i, (name, shape) in enumerate(shapes.items())
    }
    ranks: list[list[CheckpointEntry]] = [[] for _ in range(rng.randint(1, 4))]
    for name, tensor in tensors.items():
        for shard in random_shards(rng, name, shapes[name]):
            rng.choice(ranks).append(CheckpointEntry(shard, "exp_avg", local(shard, tensor)))
    checkpoint = open_checkpoint(tiny.save(tmp_path / str(seed), 1, ranks))
    wanted = [
        (shard, tensor)
        for name, tensor in tensors.items()
        for shard in random_shards(rng, name, shapes[name])
    ]
    got = [
        CheckpointEntry(shard, "exp_avg", torch.zeros_like(local(shard, tensor)))
        for shard, tensor in wanted
    ]
    checkpoint.load_into(got, ALONE)
    assert all(
        torch.equal(entry.tensor, local(shard, tensor))
        for entry, (shard, tensor) in zip(got, wanted, strict=True)
    )


def test_each_stored_box_is_read_once(
    tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model()
    checkpoint = open_checkpoint(tiny.save(tmp_path, 1, tiny.cut(model, 2, 1)))
    reads: list[tuple[Path, int]] = []
    read = storage.mapped

    def counted(path: Path, start: int, nbytes: int) -> memoryview:
        reads.append((path, start))
        return read(path, start, nbytes)

    monkeypatch.setattr(storage, "mapped", counted)
    checkpoint.load_into(tiny.cut(model, 1, 3, blank=True)[1], ALONE)
    assert len(reads) == len(set(reads)) > 10
    assert reads == sorted(reads), "in the order of the files"


def test_a_box_of_a_tensor_can_be_read_in_another_dtype(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    model = tiny.model()
    checkpoint = open_checkpoint(tiny.save(tmp_path, 1, tiny.cut(model, 3, 2)))
    whole_one = model["master", "embed.weight"]
    assert checkpoint.shape("optimizer.master.embed.weight") == (7, 6)
    assert checkpoint.dtype("model.embed.weight") == torch.bfloat16
    got = checkpoint.read("optimizer.master.embed.weight", ((2, 6), (1, 5)), torch.float64)
    assert torch.equal(got, whole_one[2:6, 1:5].double())
    assert checkpoint.read("model.norm.weight", ((3, 3),)).shape == (0,)
    with pytest.raises(
        CheckpointError,
        match=r"embed.weight has shape \[7, 6\], and \[0:8, 0:6\] was requested.* Use a box",
    ):
        checkpoint.read("model.embed.weight", ((0, 8), (0, 6)))
    with pytest.raises(
        CheckpointError, match=r"there is no tensor model.embed.wait. Use .* model.embed.weight"
    ):
        checkpoint.read("model.embed.wait")


def test_keys_name_every_role(tmp_path: Path, tiny: SimpleNamespace) -> None:
    checkpoint = open_checkpoint(tiny.save(tmp_path, 1, tiny.cut(tiny.model(), 1, 1)))
    assert len(checkpoint.keys()) == 4 * len(tiny.shapes)
    assert (
        checkpoint.keys()[0] == "model.embed.weight"
        and checkpoint.keys()[-1] == "optimizer.master.norm.weight"
    )


def test_weights_in_another_dtype_are_read_from_master_weights(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    model = tiny.model()
    checkpoint = open_checkpoint(tiny.save(tmp_path, 1, tiny.cut(model, 2, 1)))
    got = entries_of({name: torch.zeros(shape) for name, shape in tiny.shapes.items()})
    moments = [
        entry for entry in tiny.cut(model, 1, 1, blank=True)[0] if entry.role.startswith("exp_avg")
    ]
    # an fp32 run has no separate master weights: they are not surplus
    checkpoint.load_into(got + moments, ALONE)
    assert all(torch.equal(entry.tensor, model["master", entry.shard.name]) for entry in got)


def test_missing_master_weights_are_read_from_weights(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    weights = {"w": torch.randn(3, 4)}
    path = saved(tmp_path, tiny, entries_of(weights))
    low, master = torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(3, 4)
    open_checkpoint(path).load_into(
        [*entries_of({"w": low}), *entries_of({"w": master}, "master")], ALONE
    )
    assert torch.equal(master, weights["w"]) and torch.equal(low, weights["w"].bfloat16())


def test_weights_alone_can_be_loaded(tmp_path: Path, tiny: SimpleNamespace) -> None:
    model = tiny.model()
    checkpoint = open_checkpoint(tiny.save(tmp_path, 1, tiny.cut(model, 1, 2)))
    got = [entry for entry in tiny.cut(model, 1, 1, blank=True)[0] if entry.role == "param"]
    assert checkpoint.load_into(got, ALONE).unexpected_keys == ()
    assert all(
        torch.equal(entry.tensor.view(-1), model["param", entry.shard.name].view(-1))
        for entry in got
    )


def test_other_shape_is_rejected_with_both_shapes(tmp_path: Path, tiny: SimpleNamespace) -> None:
    path = saved(
        tmp_path, tiny, entries_of({"a": torch.ones(4, 6), "b": torch.ones(5), "c": torch.ones(2)})
    )
    got = entries_of({"a": torch.zeros(4, 8), "b": torch.zeros(7), "c": torch.zeros(2)})
    for rules in (
        CheckpointConfig(),
        CheckpointConfig(missing_keys="ignore", unexpected_keys="ignore"),
    ):
        with pytest.raises(CheckpointError) as raised:
            open_checkpoint(path).load_into(got, ALONE, rules=rules, purpose="start")
        assert str(raised.value) == (
            f"{path} is a checkpoint of another model:\n"
            f"  model.a is [4, 8] in this run and [4, 6] in the checkpoint\n"
            f"  model.b is [7] in this run and [5] in the checkpoint\n"
            f"Set model.* and optim.* to what {path}/config.yaml says, or choose another "
            "checkpoint."
        )
    assert not any(entry.tensor.any() for entry in got), "nothing was changed"


def test_missing_and_unexpected_keys_are_all_named_in_few_lines(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    stored = {f"layers.{i}.attention.q": torch.ones(2) for i in range(12)} | {
        "norm.weight": torch.ones(1)
    }
    path = saved(tmp_path, tiny, entries_of(stored))
    tensors = {f"layers.{i}.attention.q": torch.zeros(2) for i in (0, 1)} | {
        "head.weight": torch.zeros(3)
    }
    got = entries_of(tensors)
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(path).load_into(got, ALONE)
    assert "\n  only in this run: model.head.weight\n" in str(raised.value)
    assert (
        "only in the checkpoint: model.layers.*.attention.q (* = 10, 11, 2, 3, 4, 5, 6, 7, 8, 9)\n"
        in str(raised.value)
    )
    assert "only in the checkpoint: model.norm.weight\n" in str(raised.value)
    rules = CheckpointConfig(missing_keys="ignore", unexpected_keys="ignore")
    report = open_checkpoint(path).load_into(got, ALONE, rules=rules, purpose="start")
    assert report.missing_keys == ("model.head.weight",) and len(report.unexpected_keys) == 11
    assert tensors["layers.1.attention.q"].tolist() == [1, 1] and not tensors["head.weight"].any()


SIDES = {
    "missing": ({"a": 2}, {"a": 2, "new": 3}),
    "unexpected": ({"a": 2, "old": 3}, {"a": 2}),
    "both": ({"a": 2, "old": 3}, {"a": 2, "new": 3}),
}
"""Parameters and their lengths in a checkpoint and in a run."""


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("answer", ["error", "warn", "ignore"])
def test_each_setting_for_missing_and_unexpected_keys(
    tmp_path: Path,
    tiny: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
    sides: str,
    answer: KeyMismatchAction,
) -> None:
    reference, ours = SIDES[sides]
    path = saved(tmp_path, tiny, entries_of({name: torch.ones(n) for name, n in reference.items()}))
    tensors = {name: torch.full((n,), 7.0) for name, n in ours.items()}
    rules = CheckpointConfig(missing_keys=answer, unexpected_keys=answer)
    if answer == "error":
        with pytest.raises(CheckpointError) as raised:
            open_checkpoint(path).load_into(
                entries_of(tensors), ALONE, rules=rules, purpose="start"
            )
        assert ("only in this run: model.new" in str(raised.value)) == (sides != "unexpected")
        assert ("only in the checkpoint: model.old" in str(raised.value)) == (sides != "missing")
        assert tensors["a"].tolist() == [7, 7], "nothing was changed"
        return
    report = open_checkpoint(path).load_into(
        entries_of(tensors), ALONE, rules=rules, purpose="start"
    )
    assert (report.missing_keys, report.unexpected_keys) == (
        ("model.new",) if sides != "unexpected" else (),
        ("model.old",) if sides != "missing" else (),
    )
    assert tensors["a"].tolist() == [1, 1] and tensors.get("new", torch.zeros(0)).tolist() in (
        [],
        [7, 7, 7],
    )
    assert ("1 tensors (3 parameters) kept their initial values" in caplog.text) == (
        sides != "unexpected"
    )
    assert (f"{path} lacks model.new" in caplog.text) == (
        answer == "warn" and sides != "unexpected"
    )
    assert (f"{path} also has model.old: not loaded" in caplog.text) == (
        answer == "warn" and sides != "missing"
    )


@pytest.mark.parametrize("answer", ["warn", "ignore"])
def test_resumed_run_requires_all_weights_under_every_setting(
    tmp_path: Path, tiny: SimpleNamespace, answer: KeyMismatchAction
) -> None:
    path = saved(
        tmp_path,
        tiny,
        entries_of({"w": torch.ones(2)}) + entries_of({"w": torch.ones(2)}, "momentum"),
    )
    rules = CheckpointConfig(missing_keys=answer, unexpected_keys=answer, skip=("w",), load="x")
    got = entries_of({"w": torch.zeros(2)}) + entries_of({"w": torch.zeros(2)}, "exp_avg")
    report = open_checkpoint(path).load_into(got, ALONE, rules=rules)
    assert report.missing_keys == ("optimizer.exp_avg.w",) and report.fresh_state
    assert got[0].tensor.tolist() == [1, 1], "what a run skipped when it began is its own by now"
    for wanted, text in (
        ({"w": 2, "v": 1}, "only in this run: model.v"),
        ({}, "only in the checkpoint: model.w"),
    ):
        entries = entries_of({name: torch.zeros(n) for name, n in wanted.items()})
        with pytest.raises(CheckpointError, match=text):
            open_checkpoint(path).load_into(entries, ALONE, rules=rules)


def test_skipped_tensors_keep_their_values_even_if_shapes_differ(
    tmp_path: Path, tiny: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(
        tmp_path,
        tiny,
        entries_of({"a.w": torch.ones(2), "head.weight": torch.ones(4), "old": torch.ones(1)}),
    )
    tensors = {"a.w": torch.zeros(2), "head.weight": torch.full((3,), 7.0)}
    rules = CheckpointConfig(skip=("head.*", "old"), load="x")
    report = open_checkpoint(path).load_into(
        entries_of(tensors), ALONE, rules=rules, purpose="start"
    )
    assert (tensors["a.w"].tolist(), tensors["head.weight"].tolist()) == ([1, 1], [7, 7, 7])
    assert report.kept == ("model.head.weight",) and not report.unexpected_keys
    assert "1 tensors (3 parameters) kept their initial values: model.head.weight" in caplog.text
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint.skip=hed.\* matches no tensor .* Use patterns of names that exist",
    ):
        wrong = CheckpointConfig(skip=("hed.*",), load="x")
        open_checkpoint(path).load_into(entries_of(tensors), ALONE, rules=wrong, purpose="start")


def corrupted_pair(tmp_path: Path, tiny: SimpleNamespace) -> Path:
    """A checkpoint of bf16 weights and fp32 master weights, of which two elements of one tensor
    disagree."""
    model = tiny.model()
    model["param", "layers.1.attention.q"].view(-1)[3] += 2.0
    model["param", "layers.1.attention.q"].view(-1)[30] = 9.0
    path = tiny.save(tmp_path, 100, tiny.cut(model, 2, 1))
    assert isinstance(path, Path)
    return path


@pytest.mark.parametrize("prefer", [False, True])
@pytest.mark.parametrize("layout", [(1, 1), (2, 2)])
def test_weights_that_differ_from_master_weights_are_reported_once(
    tmp_path: Path,
    tiny: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
    run_threads: Callable[..., list[Any]],
    layout: tuple[int, int],
    prefer: bool,
) -> None:
    path = corrupted_pair(tmp_path, tiny)
    parts = tiny.cut(tiny.model(seed=1), *layout)
    rules = CheckpointConfig(prefer_weights=prefer)
    run_threads(
        len(parts),
        lambda world: open_checkpoint(path).load_into(parts[world.rank], world, rules=rules),
    )
    stored = open_checkpoint(path)
    for entries in parts:
        results = {entry.key: entry for entry in entries}
        for name in tiny.shapes:
            weights, master = results[f"model.{name}"], results[f"optimizer.master.{name}"]
            low = weights.tensor.view(-1)[slice(*(master.shard.flat or (None, None)))]
            believed = stored.read(f"model.{name}" if prefer else f"optimizer.master.{name}")
            assert torch.equal(low, master.tensor.view(-1).bfloat16())
            assert torch.equal(low, local(master.shard, believed).bfloat16())
            if name != "layers.1.attention.q":
                assert torch.equal(
                    master.tensor, local(master.shard, stored.read(f"optimizer.master.{name}"))
                )
    warnings = [
        record.getMessage() for record in caplog.records if "rounded" in record.getMessage()
    ]
    assert len(warnings) == 1
    assert (
        f"{path}: the weights of 1 parameters are not their master weights, rounded: "
        "layers.1.attention.q" in warnings[0]
    )
    assert f"The {'weights' if prefer else 'master weights'} are used." in warnings[0]


def test_run_without_master_weights_compares_stored_ones_too(
    tmp_path: Path, tiny: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    path = corrupted_pair(tmp_path, tiny)
    for prefer in (False, True):
        got = entries_of({name: torch.zeros(shape) for name, shape in tiny.shapes.items()})
        rules = CheckpointConfig(prefer_weights=prefer)
        open_checkpoint(path).load_into(got, ALONE, rules=rules, purpose="start")
        changed = {entry.shard.name: entry.tensor for entry in got}[
            "layers.1.attention.q"
        ].flatten()
        assert (changed[30] == 9.0) == prefer
        kept = (
            changed[4]
            == open_checkpoint(path).read("optimizer.master.layers.1.attention.q").flatten()[4]
        )
        assert kept, "digits of elements that agree stay"
    assert caplog.text.count("layers.1.attention.q differs most, by ") == 2


def test_equal_weights_and_master_weights_are_not_reported(
    tmp_path: Path, tiny: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny.save(tmp_path, 100, tiny.cut(tiny.model(), 2, 1))
    open_checkpoint(path).load_into(tiny.cut(tiny.model(), 1, 1, blank=True)[0], ALONE)
    assert not caplog.records


def test_missing_optimizer_state_is_rejected(tmp_path: Path, tiny: SimpleNamespace) -> None:
    path = saved(
        tmp_path,
        tiny,
        entries_of({"w": torch.ones(2)}) + entries_of({"w": torch.ones(2)}, "momentum"),
    )
    got = entries_of({"w": torch.ones(2)}) + entries_of({"w": torch.ones(2)}, "exp_avg")
    with pytest.raises(
        CheckpointError,
        match=r"this run: optimizer.exp_avg.w\n  only .* checkpoint: optimizer.momentum.w",
    ):
        open_checkpoint(path).load_into(got, ALONE)


def test_ranks_may_load_different_tensors(
    tmp_path: Path, tiny: SimpleNamespace, run_threads: Callable[..., list[Any]]
) -> None:
    path = saved(tmp_path, tiny, entries_of({"a": torch.ones(2), "b": torch.ones(3)}))
    parts = [entries_of({"a": torch.zeros(2)}), entries_of({"b": torch.zeros(3)})]
    run_threads(2, lambda world: open_checkpoint(path).load_into(parts[world.rank], world))
    assert all(entry.tensor.all() for part in parts for entry in part)


def test_damage_read_by_one_rank_ends_the_load_on_all(
    tmp_path: Path, tiny: SimpleNamespace, run_threads: Callable[..., list[Any]]
) -> None:
    path = saved(tmp_path, tiny, entries_of({"a": torch.ones(2), "b": torch.ones(3)}))
    # a comes first
    (path / "__0_0.distcp").write_bytes(bytes(1) + (path / "__0_0.distcp").read_bytes()[1:])

    def work(world: Group) -> Any:
        entry = entries_of({"a": torch.zeros(2)} if world.rank else {"b": torch.zeros(3)})
        return open_checkpoint(path).load_into(entry, world)

    errors = run_threads(2, work)
    assert str(errors[0]) == str(errors[1]) and "__0_0.distcp" in str(errors[0])
    assert {type(error) for error in errors} == {DamagedCheckpointError} and {
        error.path for error in errors
    } == {path}


def test_flipped_bit_is_reported_with_its_position(tmp_path: Path, tiny: SimpleNamespace) -> None:
    path = saved(tmp_path, tiny, entries_of({"a": torch.ones(64), "b": torch.ones(64)}))
    file = path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[-700] ^= 4
    file.write_bytes(data)
    second = open_checkpoint(path).manifest.tensors["model.b"].boxes[0]
    text = (
        f"{file}: the {second.nbytes:,} bytes from {second.offset:,} on (model.b [0:64]): damaged. "
        f"SHA-256 expected {second.sha256}, found "
    )
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(path).read("model.b")
    assert str(raised.value).startswith(text)
    assert str(raised.value).endswith("Copy the checkpoint again, or use an older one.")
    assert open_checkpoint(path).read("model.a").sum() == 64
    assert [problem.startswith(text) for problem in verify_checkpoint(path)] == [True]


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def test_error_of_a_damaged_newest_checkpoint_names_the_complete_ones(
    tmp_path: Path, tiny: SimpleNamespace, run_threads: Callable[..., list[Any]]
) -> None:
    paths = [
        tiny.save(tmp_path, step, [entries_of({"a": torch.ones(64)})])
        for step in (2, 4, 6, 8, 10, 12)
    ]
    flip_a_bit(paths[-1] / "__0_0.distcp")
    (paths[1] / "manifest.json").unlink()
    assert find_latest(tmp_path) == paths[-1], "the tensors are not read for that"

    def load(world: Group) -> Any:
        return open_checkpoint(paths[-1]).load_into(entries_of({"a": torch.zeros(64)}), world)

    errors = run_threads(2, load)
    assert {type(error) for error in errors} == {DamagedCheckpointError} and str(errors[0]) == str(
        errors[1]
    )
    assert {error.path for error in errors} == {paths[-1]} and "To resume" not in errors[0].reason
    assert list_other_checkpoints(paths[-1]) == [paths[4], paths[3], paths[2], paths[0]]
    assert "(model.a [0:64]): damaged. SHA-256 expected" in str(errors[0])
    assert str(errors[0]).endswith(
        "\nComplete in the same folder: step_0000010, step_0000008, step_0000006 and 1 more. To "
        f"resume from step_0000010, remove {paths[-1]}, or rename it to step_0000012.damaged."
    )
    paths[-1].rename(tmp_path / "step_0000012.damaged")
    assert find_latest(tmp_path) == paths[-2], "the advice works"


def test_error_of_a_damaged_only_checkpoint_names_no_other(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    path = saved(tmp_path, tiny, entries_of({"a": torch.ones(64)}))
    flip_a_bit(path / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="Copy the checkpoint again, or use an older one.$"):
        open_checkpoint(path).load_into(entries_of({"a": torch.zeros(64)}), ALONE)


@pytest.mark.parametrize("name", ["state.json", "config.yaml", ".metadata"])
def test_changed_text_is_detected(tmp_path: Path, tiny: SimpleNamespace, name: str) -> None:
    path = saved(tmp_path, tiny, entries_of({"a": torch.ones(2)}))
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[:-2] + b"x" + data[-1:])
    assert [
        problem.startswith(f"{path / name}: damaged. SHA-256 exp")
        for problem in verify_checkpoint(path)
    ] == [True]
    if name != ".metadata":  # which we never read
        with pytest.raises(CheckpointError, match=f"{name}: damaged"):
            open_checkpoint(path)


def swap_boxes(raw: Any) -> None:
    """Let each of two tensors of one shape have the bytes of the other."""
    a, b = raw["tensors"]["model.a"], raw["tensors"]["model.b"]
    a["boxes"], b["boxes"] = b["boxes"], a["boxes"]


@pytest.mark.parametrize(
    "change", [swap_boxes, lambda raw: raw.update(step=99)], ids=["swapped boxes", "step"]
)
def test_edited_manifest_is_rejected_and_an_older_checkpoint_is_used(
    tmp_path: Path,
    tiny: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Any], object],
) -> None:
    entries = entries_of({"a": torch.ones(2), "b": torch.zeros(2)})
    older, path = (tiny.save(tmp_path, step, [entries]) for step in (50, 100))
    raw = json.loads((path / "manifest.json").read_text())
    saved_digest = raw[MANIFEST_SHA256]
    change(raw)
    (path / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(path)
    assert str(raised.value) == (
        f"{path}/manifest.json: this file was changed after it was saved. manifest_sha256 says "
        f"{saved_digest}, and its "
        f"other fields have {manifest_digest(raw)}. Copy the folder again, or use another "
        "checkpoint."
    )
    assert verify_checkpoint(path) == [str(raised.value)]
    assert find_latest(tmp_path) == older
    assert (
        f"skipping checkpoint step_0000100: {path}/manifest.json: this file was changed"
        in caplog.text
    )


def test_manifest_without_a_checksum_is_loaded_with_a_warning(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    """As versions before 2026-11-24 saved it."""
    path = saved(tmp_path, tiny, entries_of({"a": torch.ones(2)}))
    assert open_checkpoint(path).warnings() == []
    raw = json.loads((path / "manifest.json").read_text())
    del raw[MANIFEST_SHA256]
    (path / "manifest.json").write_text(json.dumps(raw))
    checkpoint = open_checkpoint(path)
    assert checkpoint.read("model.a").tolist() == [1, 1] and verify_checkpoint(path) == []
    (warning,) = checkpoint.warnings()
    assert warning.startswith(
        f"{path}/manifest.json has no manifest_sha256, as it was saved by an older version: "
    )


def test_checkpoint_copied_without_dot_files_is_loaded_with_a_warning(
    tmp_path: Path, tiny: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tmp_path, tiny, entries_of({"a": torch.ones(2)}))
    nbytes = (path / ".metadata").stat().st_size
    (path / ".metadata").unlink()
    assert find_latest(tmp_path) == path and caplog.text == ""
    checkpoint = open_checkpoint(path)
    assert checkpoint.read("model.a").tolist() == [1, 1] and verify_checkpoint(path) == []
    assert checkpoint.warnings() == [
        f"{path}/.metadata: cannot be read (No such file or directory); expected {nbytes:,} bytes. "
        "Megalith does not "
        "read this file, torch.distributed.checkpoint does. If you need it, copy the checkpoint "
        "with a tool that "
        f"copies files whose names begin with a dot, such as cp -r."
    ]


def test_a_truncated_file_is_named_with_both_lengths(tmp_path: Path, tiny: SimpleNamespace) -> None:
    path = saved(tmp_path, tiny, entries_of({"a": torch.ones(2)}))
    file = path / "__0_0.distcp"
    full = file.stat().st_size
    os.truncate(file, 1024)
    text = f"{file} is 1,024 bytes, expected {full:,}: the checkpoint is incomplete.\nCopy"
    with pytest.raises(CheckpointError, match=text):
        open_checkpoint(path)
    assert len(verify_checkpoint(path)) == 1 and verify_checkpoint(path)[0] == text.removesuffix(
        "\nCopy"
    )


def test_missing_file_is_named_with_its_tensors(tmp_path: Path, tiny: SimpleNamespace) -> None:
    path = saved(tmp_path, tiny, entries_of({"a": torch.ones(2), "b": torch.ones(2)}))
    (path / "__0_0.distcp").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"__0_0.distcp: cannot be read \(No such file.*parts of 2 tensors.\nCopy",
    ):
        open_checkpoint(path)


def test_a_file_that_shrinks_after_opening_is_an_error_and_not_a_short_tensor(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    checkpoint = open_checkpoint(saved(tmp_path, tiny, entries_of({"a": torch.ones(2)})))
    os.truncate(checkpoint.path / "__0_0.distcp", 100)
    with pytest.raises(CheckpointError, match=r"the file ends after 100 of them. Copy"):
        checkpoint.read("model.a")
    (checkpoint.path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read \(.*No such file.*\). Copy"):
        checkpoint.read("model.a")


@pytest.mark.parametrize("how", ["pickle", "torch.save", "legacy"])
def test_pickle_instead_of_tensor_is_rejected_without_execution(
    tmp_path: Path, tiny: SimpleNamespace, how: str
) -> None:
    path = saved(tmp_path, tiny, entries_of({"a": torch.ones(2), "b": torch.ones(2)}))
    evil, stream = Evil(tmp_path / "ran"), io.BytesIO()
    if how == "pickle":
        pickle.dump(evil, stream)
    else:
        torch.save(evil, stream, _use_new_zipfile_serialization=how == "torch.save")
    plant(path, "model.a", stream.getvalue())
    with pytest.raises(
        CheckpointError,
        match=r"\(model.a \[0:2\]\) are not a plain tensor, and nothing in them was run",
    ):
        open_checkpoint(path).read("model.a")
    with pytest.raises(CheckpointError, match="nothing in them was run"):
        open_checkpoint(path).load_into(entries_of({"a": torch.ones(2), "b": torch.ones(2)}), ALONE)
    assert len(verify_checkpoint(path)) == 1
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(evil))  # the planted fault is a real one
    assert (tmp_path / "ran").exists()


def test_a_malicious_dcp_description_is_never_opened(tmp_path: Path, tiny: SimpleNamespace) -> None:
    path = saved(tmp_path, tiny, entries_of({"a": torch.ones(2)}))
    data = pickle.dumps(Evil(tmp_path / "ran"))
    (path / ".metadata").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    edit_manifest(
        path,
        lambda raw: raw["files"].update({".metadata": {"nbytes": len(data), "sha256": digest}}),
    )
    assert find_latest(tmp_path) == path
    assert verify_checkpoint(path) == []
    assert open_checkpoint(path).read("model.a").tolist() == [1, 1]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "value,found",
    [
        (torch.ones(3), r"\[3\] torch.float32"),
        (torch.ones(2, dtype=torch.int64), r"\[2\] torch.int64"),
        ({"a": torch.ones(2)}, "dict"),
    ],
)
def test_unexpected_tensor_contents_are_rejected(
    tmp_path: Path, tiny: SimpleNamespace, value: object, found: str
) -> None:
    path = saved(tmp_path, tiny, entries_of({"a": torch.ones(2)}))
    stream = io.BytesIO()
    torch.save(value, stream)
    plant(path, "model.a", stream.getvalue())
    with pytest.raises(CheckpointError, match=rf"hold {found}; expected \[2\] torch.float32"):
        open_checkpoint(path).read("model.a")


@pytest.mark.parametrize("state", ["[]", "{", "[" * 100_000])
def test_state_that_is_not_an_object_is_rejected(
    tmp_path: Path, tiny: SimpleNamespace, state: str
) -> None:
    path = saved(tmp_path, tiny, entries_of({"a": torch.ones(2)}))
    (path / "state.json").write_text(state)
    record = {"nbytes": len(state), "sha256": hashlib.sha256(state.encode()).hexdigest()}
    edit_manifest(path, lambda raw: raw["files"].update({"state.json": record}))
    with pytest.raises(CheckpointError, match="cannot be read .*Use another"):
        open_checkpoint(path)


def test_weights_without_training_state_cannot_be_resumed(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    entries = entries_of({"a": torch.ones(2)})
    full = open_checkpoint(tiny.save(tmp_path, 1, [entries], {"train": {"step": 1}, "data": None}))
    assert full.require_state("train", "data") == full.require_state() == full.state
    released = open_checkpoint(tiny.save(tmp_path, 2, [entries], {"data": None}))
    with pytest.raises(CheckpointError) as raised:
        released.require_state("train", "data", "order_samples")
    assert str(raised.value) == (
        f"{released.path}: no run can be resumed from it, because its state.json lacks train, "
        "order_samples (found: data). "
        f"To start from its weights, move it out of {tmp_path} and set checkpoint.load to its new "
        "path."
    )
    with pytest.raises(CheckpointError, match=r"lacks train \(found: nothing\)"):
        open_checkpoint(tiny.save(tmp_path, 3, [entries], {})).require_state("train")


def test_error_describes_folder_that_is_not_a_checkpoint(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    path = tiny.save_alone(tmp_path / "run" / "checkpoints", 100).path
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        with pytest.raises(
            CheckpointError, match=f"{folder}: this folder holds checkpoints.*. Use one of {path}"
        ):
            open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=f"{tmp_path}/no: no such folder. Set"):
        open_checkpoint(tmp_path / "no")
    (path / "manifest.json").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"not a complete checkpoint: it has no manifest.json \(found: .metadata",
    ):
        open_checkpoint(path)
    assert "no manifest.json" in verify_checkpoint(path)[0]
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match="looks like a Hugging Face model.*Run `megalith convert`"
    ):
        open_checkpoint(tmp_path / "hf")


def test_newest_complete_checkpoint_is_found_despite_pointer(
    tmp_path: Path, tiny: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "nowhere") is None
    paths = [tiny.save_alone(tmp_path, step).path for step in (100, 20_000_000, 300)]
    assert find_latest(tmp_path) == paths[1]
    assert (
        f"{tmp_path}/latest says 'step_0000300'; the newest complete checkpoint is step_20000000"
        in caplog.text
    )
    for text in ("", "\xff\n", None):
        (tmp_path / "latest").unlink() if text is None else (tmp_path / "latest").write_text(text)
        assert find_latest(tmp_path) == paths[1]


def test_find_latest_writes_nothing(
    tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (tiny.save_alone(tmp_path, step).path for step in (1, 2))
    (second / "manifest.json").unlink()

    def refuse(*_: object) -> None:
        raise AssertionError("a reader writes")

    for name in (
        "open_new",
        "replace_file",
        "write_new",
        "rename",
        "remove_file",
        "remove_tree",
        "make_folder",
    ):
        monkeypatch.setattr(storage, name, refuse)
    before = [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))]
    assert find_latest(tmp_path) == first
    assert [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))] == before
    assert (tmp_path / "latest").read_text() == "step_0000002\n"


def test_damaged_newest_checkpoint_is_skipped_with_reason(
    tmp_path: Path, tiny: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = (tiny.save_alone(tmp_path, step).path for step in (1, 2, 3))
    os.truncate(third / "__0_0.distcp", 7)
    (second / "manifest.json").unlink()
    assert find_latest(tmp_path) == first
    assert f"skipping checkpoint step_0000003: {third}/__0_0.distcp is 7 bytes" in caplog.text
    assert (
        "skipping checkpoint step_0000002" in caplog.text
        and "it has no manifest.json" in caplog.text
    )


def test_run_does_not_start_from_step_0_if_no_checkpoint_can_be_used(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    for step in (1, 2):
        os.truncate(tiny.save_alone(tmp_path, step).path / "manifest.json", 9)
    with pytest.raises(
        CheckpointError,
        match=r"(?s)none of its 2 checkpoints can be used:\n  step_0000002: .*--run",
    ):
        find_latest(tmp_path)


def test_a_symlink_to_a_checkpoint_elsewhere_is_followed(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    path = tiny.save_alone(tmp_path / "elsewhere", 5).path
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "step_0000005").symlink_to(path)
    assert find_latest(tmp_path / "here") == tmp_path / "here" / "step_0000005"
