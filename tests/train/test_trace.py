"""The routing trace: what every token chose, once each under every layout, in the first steps
and no others; and what lies beside it."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalith.config.moe import AuxLossConfig, CapacityConfig, MoEConfig
from megalith.config.observe import Captured
from megalith.config.train import TrainRun
from megalith.kernels.layer_inputs import RoutingRecord
from megalith.observe.metrics import read_metrics
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.rules.run import run_problems
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.callbacks import trace
from megalith.train.callbacks.trace import RoutingTrace
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "experts.md"
MOE = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=6, aux_loss=AuxLossConfig(batch_coeff=0.1))
SETTINGS = {
    "observe.routing_trace": "2",
    "precision.params": "fp64",
    "train.steps": "3",
    "train.eval_steps": "0",
    "train.eval_every": "none",
    "checkpoint.every": "0",
    "schedule.decay_steps": "3",
    "train.global_batch_size": "8",
}


def mixture(moe: MoEConfig = MOE, /, **settings: str) -> TrainRun:
    """The tiny run with experts in two layers and in an MTP layer; with settings
    (__ for dots)."""
    given = {name.replace("__", "."): value for name, value in settings.items()}
    run = tiny_run(SETTINGS | {"model.mtp.num_layers": "1"} | given)
    return replace(run, model=replace(run.model, moe=moe))


def train(rank: int, world: int, run: TrainRun, path: Path) -> None:
    """One rank of a run."""
    mesh = (
        build_single_rank_mesh()
        if world == 1
        else build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    )
    run_training(run, RunFolder(path), mesh, torch.device("cpu"), show=False)


def rows(path: Path) -> list[dict[str, Any]]:
    """All lines of all ranks."""
    files = sorted((path / "routing").glob("rank_*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


ALL = "[hidden, logits, weights, routers]"


def captured(path: Path) -> Counter[tuple[int, str, bytes]]:
    """How often tokens of a step and layer had the same choices, hidden states, logits and weights,
    bit by bit."""
    counts: Counter[tuple[int, str, bytes]] = Counter()
    for row in rows(path):
        beside = load_file(path / "routing" / row["sidecar"])
        kinds = [
            beside[f"{row['layer']}/{row['microbatch']}/{kind}"]
            for kind in ("hidden", "logits", "weights")
        ]
        widths = [values.shape[1] for values in kinds]
        assert {(values.dtype, len(values)) for values in kinds} == {
            (torch.bfloat16, row["num_tokens"])
        }
        assert widths == [24, 4, 2]
        raise_on_all_ranks = torch.cat(
            [torch.tensor(row["experts"]).to(torch.bfloat16), *kinds], dim=1
        ).view(torch.int16)
        counts.update(
            (row["step"], row["layer"], token.numpy().tobytes()) for token in raise_on_all_ranks
        )
    return counts


def routers(path: Path, step: int) -> dict[str, Tensor]:
    """What routers had of their own in a step, of all ranks; each once."""
    results: dict[str, Tensor] = {}
    for file in sorted((path / "routing").glob(f"rank_*_step_{step:07d}.safetensors")):
        router_tensors = {
            name: values for name, values in load_file(file).items() if "/router/" in name
        }
        assert not router_tensors.keys() & results.keys()
        results |= router_tensors
    return results


def choices(found: list[dict[str, Any]]) -> Counter[tuple[int, str, tuple[int, ...]]]:
    """How often tokens of a step and layer chose what, whichever rank they were on."""
    return Counter(
        (row["step"], row["layer"], tuple(experts)) for row in found for experts in row["experts"]
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on one rank."""
    folder = tmp_path_factory.mktemp("trace") / "runs" / "moe_tiny"
    train(0, 1, mixture(observe__routing_captures=ALL), folder)
    return folder


def test_trace_has_a_line_per_layer_and_microbatch_of_the_first_steps(whole: Path) -> None:
    result = rows(whole)
    layers = ["layers.0", "layers.1", "mtp.0.layer"]
    assert [(row["step"], row["layer"], row["microbatch"]) for row in result] == [
        (step, layer, microbatch) for step in (1, 2) for layer in layers for microbatch in range(4)
    ]
    for row in result:
        assert (row["stage"], row["rank"], row["top_k"]) == (0, 0, 2) and row[
            "num_tokens"
        ] == 2 * 12
        assert (row["dp"], row["cp"], row["tp"]) == (0, 0, 0)
        assert row.get("mtp") == (0 if row["layer"] == "mtp.0.layer" else None)
        assert [len(experts) for experts in row["experts"]] == [2] * 24
        assert all(
            len({*experts}) == 2 and {*experts} <= {0, 1, 2, 3} for experts in row["experts"]
        )
    logged = read_metrics(whole / "metrics.jsonl")[0]
    second = [row["experts"] for row in result if (row["step"], row["layer"]) == (1, "layers.1")]
    counts = Counter(
        expert for microbatch in second for experts in microbatch for expert in experts
    )
    assert logged["moe_layers_1_load"] == pytest.approx(
        max(counts.values()) * 4 / counts.total(), abs=1e-4
    )
    assert f"moe_{layers[2].replace('.', '_')}_load" in logged


WHOLE = {"parallel__etp": "1"}
PAIRS = {
    "parallel__dp": "2",
    "parallel__ep": "2",
    "parallel__overlap_experts": "true",
    "recompute__granularity": "selective",
    "recompute__modules": "[mlp]",
}


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (
            4,
            {"parallel__pp": "2", "parallel__tp": "2", "parallel__sp": "true", "parallel__ep": "2"}
            | WHOLE,
        ),
        pytest.param(2, {"parallel__dp": "2", "parallel__ep": "2"}, marks=pytest.mark.slow),
        pytest.param(
            2, {"parallel__cp": "2", "recompute__granularity": "full"}, marks=pytest.mark.slow
        ),
        pytest.param(2, PAIRS, marks=pytest.mark.slow),
        pytest.param(2, {"parallel__dp": "2", "parallel__zero": "3"}, marks=pytest.mark.slow),
    ],
    ids=[
        "pp2 tp2 sp ep2",
        "dp2 ep2",
        "cp2, computed again",
        "dp2 ep2, pairs, computed again",
        "dp2, zero 3",
    ],
)
def test_every_token_is_traced_once_under_every_layout(
    world: int, layout: dict[str, str], whole: Path, tmp_path: Path
) -> None:
    run = mixture(train__steps="2", observe__routing_captures=ALL, **layout)
    assert run_problems(run, world) == []
    run_ranks(train, world, run, tmp_path)
    result = rows(tmp_path)
    assert choices(result) == choices(rows(whole))
    assert captured(tmp_path) == captured(whole)
    assert {row["rank"] for row in result} == set(range(world))
    stages = {(row["layer"], row["stage"]) for row in result}
    assert len(stages) == 3 and {stage for _, stage in stages} == set(range(run.parallel.pp))
    changed_routers, others = routers(tmp_path, 2), routers(whole, 2)
    assert (
        changed_routers.keys() == others.keys() == {f"{layer}/router/weight" for layer, _ in stages}
    )
    for name, weight in others.items():
        torch.testing.assert_close(changed_routers[name], weight, rtol=1e-9, atol=0)


def test_trace_has_choices_before_token_dropping(tmp_path: Path) -> None:
    capacity = replace(MOE, capacity=CapacityConfig(factor=0.5))
    train(
        0, 1, mixture(capacity, train__steps="1", observe__routing_captures="[weights]"), tmp_path
    )
    refused = read_metrics(tmp_path / "metrics.jsonl")[0]["moe_dropped_share"]
    (beside,) = (tmp_path / "routing").glob("*.safetensors")
    weights = torch.cat([*load_file(beside).values()])
    assert refused != 0 and (weights == 0).double().mean() == pytest.approx(refused, abs=1e-6)
    assert all(
        0 <= expert < 4
        for row in rows(tmp_path)
        for experts in row["experts"]
        for expert in experts
    )


def test_padding_tokens_of_packs_are_not_traced(tmp_path: Path) -> None:
    packs = {
        "train__tokens_per_microbatch": "24",
        "train__micro_batch_size": "1",
        "data__overlong": "truncate",
    }
    train(0, 1, mixture(observe__routing_captures=ALL, **packs), tmp_path)
    result, logged = rows(tmp_path), read_metrics(tmp_path / "metrics.jsonl")
    read = [
        sum(row["num_tokens"] for row in result if (row["step"], row["layer"]) == (s, "layers.1"))
        for s in (1, 2)
    ]
    assert (
        read == [logged[0]["tokens"], logged[1]["tokens"] - logged[0]["tokens"]]
        and logged[0]["fill"] < 1
    )
    assert sum(captured(tmp_path).values()) == 3 * sum(read), "what lies beside it has as many rows"


def test_disabled_trace_writes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*arguments: object) -> None:
        raise AssertionError("choices are written down")

    monkeypatch.setattr("megalith.kernels.layer_inputs.MicrobatchRouting.record", forbid)
    train(0, 1, mixture(observe__routing_trace="0", train__steps="1"), tmp_path)
    assert not (tmp_path / "routing").exists()
    with pytest.raises(AssertionError, match="written down"):
        train(0, 1, mixture(), tmp_path / "traced")


def test_resumed_run_traces_no_step_twice(whole: Path, tmp_path: Path) -> None:
    train(0, 1, mixture(train__steps="1", observe__routing_captures=ALL), tmp_path)
    file = tmp_path / "routing" / "rank_00000.jsonl"
    first, beside = file.read_text(), file.with_name("rank_00000_step_0000001.safetensors")
    with file.open("a") as killed:
        killed.write(first.replace('"step":1', '"step":2') + '{"step":2,"sta')
    left = ["rank_00000_step_0000002.safetensors.part", "rank_00000_step_0000003.safetensors"]
    gone = file.with_name("rank_00007.jsonl")
    gone.write_text(first.replace('"step":1', '"step":2'))
    for name in (*left, "rank_00007_step_0000002.safetensors"):
        file.with_name(name).write_bytes(b"killed")
    train(0, 1, mixture(observe__routing_captures=ALL), tmp_path)
    assert gone.read_text() == "", "no such rank is there any more"
    assert rows(tmp_path) == rows(whole) and captured(tmp_path) == captured(whole)
    assert sorted(path.name for path in file.parent.glob("*.safetensors*")) == [
        beside.name,
        beside.name.replace("1.s", "2.s"),
    ]
    train(0, 1, mixture(train__steps="4", observe__routing_captures=ALL), tmp_path)
    assert rows(tmp_path) == rows(whole), "later steps leave it as it is"


def test_resume_with_fewer_traced_steps_removes_later_rows(
    tmp_path: Path,
) -> None:
    train(0, 1, mixture(train__steps="1"), tmp_path)
    file = tmp_path / "routing" / "rank_00000.jsonl"
    first = file.read_text()
    file.write_text(first + first.replace('"step":1', '"step":2'))
    train(0, 1, mixture(observe__routing_trace="0"), tmp_path)
    assert file.read_text() == first


def test_resume_after_all_traced_steps_warns_about_missing_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(0, 1, mixture(train__steps="2", observe__routing_trace="0"), tmp_path)
    train(0, 1, mixture(observe__routing_trace="1"), tmp_path)
    output = (
        "observe.routing_trace=1: nothing is traced, because this run continues after step 2. Set "
        "it to 3 or more"
    )
    assert output in caplog.text and not any((tmp_path / "routing").glob("rank_*"))


def test_damaged_trace_ends_and_is_not_modified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(0, 1, mixture(train__steps="1"), tmp_path)
    file = tmp_path / "routing" / "rank_00000.jsonl"
    damaged = file.read_text() + "\0\0\n"
    file.write_text(damaged)
    train(0, 1, mixture(), tmp_path)
    assert file.read_text() == damaged
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 3
    reported = capsys.readouterr().err
    assert (
        "this rank's routing trace ends at step 1, the run continues" in reported
        and "is not a row of metrics" in reported
    )


def test_damaged_trace_of_former_rank_does_not_stop_other_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(0, 1, mixture(train__steps="1", observe__routing_trace="3"), tmp_path)
    own_file, gone = tmp_path / "routing/rank_00000.jsonl", tmp_path / "routing/rank_00005.jsonl"
    gone.write_text("\0\0\n{}\n")
    train(0, 1, mixture(train__steps="2", observe__routing_trace="3"), tmp_path)
    assert "a rank that no longer exists is damaged and is unchanged" in capsys.readouterr().err
    assert gone.read_text() == "\0\0\n{}\n" and '"step":2' in own_file.read_text()
    own_file.write_text(own_file.read_text() + "\0\0\n")
    gone.unlink()
    train(0, 1, mixture(train__steps="3", observe__routing_trace="2"), tmp_path)
    assert "routing trace" not in capsys.readouterr().err


def test_a_full_disk_ends_the_trace_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RoutingTrace, "write", full)
    train(0, 1, mixture(), tmp_path)
    reported = capsys.readouterr().err
    assert (
        reported.count("the run continues without this rank's routing trace") == 1
        and "No space left" in reported
    )
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 3


def test_trace_has_complete_steps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = RoutingTrace(tmp_path, build_single_rank_mesh(), steps=3)
    monkeypatch.setattr(
        trace, "trace_rows", lambda step, *rest: [{"step": step, "experts": [[1, 0]]}]
    )
    written.write(1, RoutingRecord(), [])
    whole = written.path.read_text()

    def half(step: int, *rest: object) -> list[dict[str, object]]:
        with written.path.open("a") as file:
            file.write('{"step":2}\n{"st')
        return [{"step": step}]

    monkeypatch.setattr(trace, "trace_rows", half)
    monkeypatch.setattr(Path, "open", _refusing(Path.open))
    with pytest.raises(OSError, match="No space left"):
        written.write(2, RoutingRecord(), [])
    monkeypatch.undo()
    assert written.path.read_text() == whole
    assert written.begin(4, []) is None and written.begin(3, []) is not None


def test_step_without_rows_has_no_captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden: tuple[Captured, ...] = ("hidden",)
    written = RoutingTrace(tmp_path, build_single_rank_mesh(), steps=3, captures=hidden, layers=1)
    for step in (1, 2, 3):
        routing = written.begin(step, [])
        assert (
            routing is not None and routing.watch is not None and written._capture_file is not None
        )
        written._capture_file.put("layers.0/0/hidden", torch.zeros(2, 3))
        if step == 3:
            written.close()  # the step failed
            break
        with monkeypatch.context() as patch:
            patch.setattr(
                trace, "trace_rows", lambda step, *rest: [{"step": step, "sidecar": rest[-1]}]
            )
            if step == 2:
                patch.setattr(Path, "open", _refusing(Path.open))
                with pytest.raises(OSError, match="No space left"):
                    written.write(step, routing, [])
            else:
                written.write(step, routing, [])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["rank_00000.jsonl", "rank_00000_step_0000001.safetensors"]
    assert json.loads(written.path.read_text()) == {"step": 1, "sidecar": names[1]}


def _refusing(opened: Any) -> Any:  # of files, as they are opened
    """Opens files, but none as a trace opens its own."""

    def fail(path: Path, mode: str = "r", **options: Any) -> Any:
        if (mode, options) == ("a", {"encoding": "utf-8"}):
            raise OSError(28, "No space left on device")
        return opened(path, mode, **options)

    return fail


def test_invalid_settings_are_rejected_with_valid_ones() -> None:
    (problem,) = run_problems(mixture(observe__routing_trace="-1"), 1)
    assert (
        problem
        == "observe.routing_trace=-1 must be at least 0. Set observe.routing_trace to 0 or more."
    )
    (problem,) = run_problems(tiny_run({"observe.routing_trace": "3"}), 1)
    assert problem.startswith(
        "observe.routing_trace=3 with model.moe=null: the model has no experts. Set model"
    )
    (problem,) = run_problems(
        mixture(observe__routing_trace="0", observe__routing_captures="[logits, hidden]"), 1
    )
    assert problem == (
        "observe.routing_captures=[logits, hidden] with observe.routing_trace=0: captures are "
        "written with a routing trace. Set observe.routing_trace=1 or more, or "
        "observe.routing_captures=[]."
    )


def test_code_of_the_docs_reads_the_trace(
    whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(whole.parents[1])
    exec(compile(code, str(PAGE), "exec"), {})  # lint: allow eval-exec: our own page
    row = rows(whole)[-1]
    logits = load_file(whole / "routing" / row["sidecar"])[
        f"{row['layer']}/{row['microbatch']}/logits"
    ].float()
    reported = capsys.readouterr().out.splitlines()
    assert len(reported) == len(rows(whole))
    second, third = logits.sort(1, descending=True).values[:, 1:3].unbind(1)
    assert reported[-1] == f"step 2, mtp.0.layer: {(second - third).mean():.3f}"
