"""Plug-ins by name: they are proved like built-in parts, and no file imports code."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from megalith.config.data import DataConfig
from megalith.config.kernels import BackendName
from megalith.config.model import ModelConfig
from megalith.config.parallel import ContextConfig, ParallelConfig
from megalith.config.plugins import ModelPlugins, load_plugin, reject_module_names
from megalith.config.train import TrainRun
from megalith.config.tree import save_yaml
from megalith.data.build import build_datasets
from megalith.data.loader import Batch
from megalith.data.sample import SampleSettings
from megalith.errors import ConfigError
from megalith.kernels.activation import swiglu
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import (
    PackedSeqParams,
    seq_params_from_queries,
    seq_params_from_rows,
)
from megalith.nn.layer import SequentialBlock
from megalith.nn.mlp import GatedMLP, choose_activation
from megalith.nn.norm import RMSNorm
from megalith.observe.metrics import read_metrics
from megalith.optim.schedule import ScheduleLengths, learning_rate
from megalith.optim.sgd import SGD
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.plan.costs import num_parameters
from megalith.plan.layers import LAYER_KINDS
from megalith.plan.serving.cache_layout import AttentionView
from megalith.recipes import resolve_run
from megalith.rules.run import check_run
from megalith.testing.tiny import tiny_run
from megalith.train.objective import LossTerm, ModelOutputs, build_objective
from megalith.train.step import train_step
from megalith.train.trainer import build_trainer
from megalith.verify.matrix import PLAIN
from megalith.verify.ranks import _loader as loader_of
from megalith.verify.ranks import compare_with_one_process, layout_case
from megalith.verify.types import type_check
from tests.estimate.test_traffic import assert_plan_holds
from tests.infer.engines import SequenceCache
from tests.recurrent_kind import STATE, WIDTH
from tests.recurrent_mixer import RecurrentMixer

ROOT = Path(__file__).parents[1]
EXAMPLE = "examples.plugin.megalith_plugin_example.attention:ValueResidualAttention"
PLUGIN = replace(PLAIN, plugins=ModelPlugins(attention=EXAMPLE))
MIXER = "tests.recurrent_mixer:RecurrentMixer"
RECURRENT = replace(PLAIN, plugins=ModelPlugins(attention=MIXER))


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tp=2, sp=True),
        pytest.param(ParallelConfig(pp=2), marks=pytest.mark.slow),
        ParallelConfig(cp=2),
    ],
    ids=["tp2+sp", "pp2", "cp2"],
)
def test_attention_plugin_matches_one_process(parallel: ParallelConfig) -> None:
    case = layout_case(PLUGIN, parallel, 2)
    assert [each for each in compare_with_one_process(case) if not each.holds] == []


@pytest.mark.parametrize(
    "parallel, documents",
    [
        pytest.param(ParallelConfig(tp=2), False, marks=pytest.mark.slow),
        (ParallelConfig(tp=2, sp=True), True),
        (ParallelConfig(pp=2), False),
        (ParallelConfig(cp=2), False),
        pytest.param(
            ParallelConfig(cp=2, context=ContextConfig(kind="a2a")), True, marks=pytest.mark.slow
        ),
    ],
    ids=["tp2", "tp2+sp, documents", "pp2", "cp2", "cp2 with a2a, documents"],
)
def test_recurrent_mixer_matches_one_process(parallel: ParallelConfig, documents: bool) -> None:
    """A mixer with a state is one module, one module of `plan/layers` and one attribute."""
    case = layout_case(RECURRENT, parallel, 2, documents=documents)
    assert [each for each in compare_with_one_process(case) if not each.holds] == []


class MixerOfLocalTokens(RecurrentMixer):
    """Faulty mixer: the state does not include the tokens of other context-parallel ranks."""

    def mix(self, u: Tensor, seq_params: PackedSeqParams) -> Tensor:
        return super().mix(u, replace(seq_params, context=None))


def test_recurrent_mixer_without_the_states_of_other_cp_ranks_is_rejected() -> None:
    model = replace(PLAIN, plugins=ModelPlugins(attention=name_of(MixerOfLocalTokens)))
    differences = compare_with_one_process(layout_case(model, ParallelConfig(cp=2), 2))
    wrong = {
        difference.what: difference.error for difference in differences if not difference.holds
    }
    assert wrong["first loss"] > 1e-6 and wrong["gradients"] > 1e-6


def test_plugins_type_check() -> None:
    for model in PLUGIN, RECURRENT:
        for parallel in (
            ParallelConfig(tp=2, sp=True, dp=2),
            ParallelConfig(tp=2, pp=2),
            ParallelConfig(cp=2, dp=2, zero=1),
        ):
            assert list(type_check(model, parallel, world=4).problems) == []


def test_planning_counts_the_layer_kind_of_a_plugin() -> None:
    h, mixer = PLAIN.hidden_size, 2 * WIDTH * PLAIN.hidden_size + WIDTH * STATE
    attention = h * PLAIN.head_size() * (2 * PLAIN.num_heads + 2 * (PLAIN.num_kv_heads or 0))
    difference = num_parameters(PLAIN) - num_parameters(RECURRENT)
    assert difference == PLAIN.num_layers * (attention - mixer)


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_measured_traffic_of_a_recurrent_mixer_matches_the_plan(axis: str) -> None:
    assert_plan_holds(2, {f"parallel.{axis}": "2", "model.plugins.attention": MIXER})


def test_type_check_rejects_a_plugin_whose_parameters_planning_counts_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RecurrentMixer, "layer_kind", LAYER_KINDS["attention"])
    problems = type_check(RECURRENT, ParallelConfig(tp=2), world=2).problems
    texts = {problem.where: problem.what for problem in problems}
    assert "planning counts none" in texts["layers.0.attention.inward"]
    assert texts["layers.0.attention.q"].startswith("the layer has no elements of it")


def test_type_check_reports_a_plugin_that_planning_counts_as_the_built_in_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(RecurrentMixer, "layer_kind")
    report = type_check(RECURRENT, ParallelConfig(tp=2), world=2)
    assert list(report.problems) == []
    assert report.untyped == (
        f"model.plugins.attention={MIXER}: has no `layer_kind`; planning counts the built-in layer",
    )


@pytest.mark.parametrize("model_config", [PLUGIN, RECURRENT], ids=["attention", "recurrent"])
def test_cached_generation_with_a_plugin_equals_one_forward_pass(model_config: ModelConfig) -> None:
    run = layout_case(model_config, ParallelConfig(), 1).run
    model = build_trainer(run, build_single_rank_mesh(), torch.device("cpu")).model
    ids = torch.arange(9) * 5 % 61
    cache = SequenceCache([AttentionView()] * PLAIN.num_layers)
    with torch.no_grad():
        whole = model.hidden_states(ids, LayerInputs(seq_params_from_rows(1, 9)))
        parts = [
            model.hidden_states(
                ids[a:b],
                LayerInputs(seq_params_from_queries([(b - a, b)])),
                cache.layers(a, b - a),
            )
            for a, b in ((0, 4), (4, 5), (5, 9))
        ]
    assert torch.allclose(torch.cat(parts), whole, rtol=1e-9, atol=1e-12)


class PluginNorm(RMSNorm):
    """RMSNorm of another package."""


class PluginMLP(GatedMLP):
    """MLP of another package."""


class PluginBlock(SequentialBlock):
    """Layer of another package."""


class PluginSGD(SGD):
    """Update rule of another package."""


def half_swiglu(gate_up: Tensor, *, kernel: BackendName = "auto") -> Tensor:
    return swiglu(gate_up, kernel=kernel) / 2


def constant_rate(schedule: object, samples: int, lengths: ScheduleLengths) -> float:
    return 0.25


class SquaredLosses:
    """Objective of another package: the square of each token's loss, and the mean loss per
    token."""

    losses: ClassVar[dict[str, LossTerm]] = {
        "loss": LossTerm("labels"),
        "token_loss": LossTerm("tokens", weight=0.5),
    }

    def __init__(self, run: TrainRun) -> None:
        self.run = run

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> dict[str, Tensor]:
        losses = outputs.token_losses(batch.labels)
        return {"loss": losses.square().sum(), "token_loss": losses.sum()}


class UndeclaredLosses(SquaredLosses):
    """Objective whose losses differ from those that it has declared."""

    losses: ClassVar[dict[str, LossTerm]] = {"loss": LossTerm("labels")}


class WithoutTerms(SquaredLosses):
    """Objective that declares names only."""

    losses: ClassVar[Any] = ["loss", "token_loss"]


class LossOfEachToken(SquaredLosses):
    """Objective that does not sum over tokens."""

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> dict[str, Tensor]:
        losses = outputs.token_losses(batch.labels)
        return {"loss": losses, "token_loss": losses}


class SingleLoss(SquaredLosses):
    """Objective that returns a tensor instead of a dict."""

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> Any:
        return outputs.loss(batch.labels)


class TwoPasses(SquaredLosses):
    """Objective that computes gradients of the output head twice."""

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> dict[str, Tensor]:
        with torch.no_grad():
            outputs.token_losses(batch.labels)
        losses = outputs.token_losses(batch.labels)
        return {"loss": outputs.loss(batch.labels), "token_loss": losses.sum()}


class MisnamedLosses(SquaredLosses):
    """Objective without a main loss."""

    losses: ClassVar[dict[str, LossTerm]] = {"square": LossTerm("labels")}


def name_of(thing: type | Any) -> str:
    return f"tests.test_plugins:{thing.__name__}"


def test_every_part_of_a_model_can_be_a_plugin() -> None:
    plugins = ModelPlugins(
        attention=EXAMPLE,
        mlp=name_of(PluginMLP),
        norm=name_of(PluginNorm),
        activation=name_of(half_swiglu),
        block=name_of(PluginBlock),
    )
    run = replace(
        layout_case(replace(PLAIN, plugins=plugins), ParallelConfig(), 1).run,
        optim=replace(tiny_run().optim, plugin=name_of(PluginSGD)),
    )
    run = replace(run, train=replace(run.train, loss_plugin=name_of(SquaredLosses)))
    trainer = build_trainer(run, build_single_rank_mesh(), torch.device("cpu"))
    layer = trainer.model.layers[0]
    kinds = [type(part).__name__ for part in (layer, layer.attention, layer.mlp, layer.mlp_norm)]
    assert kinds == ["PluginBlock", "ValueResidualAttention", "PluginMLP", "PluginNorm"]
    assert choose_activation(run.model).__name__ == "half_swiglu"
    assert {type(rule).__name__ for rule in trainer.optimizer.rules.values()} == {"PluginSGD"}
    loader = loader_of(run, trainer.mesh, consumed=0, steps=1)
    result = train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.0)
    assert result.other_losses["token_loss"] ** 2 <= result.loss


@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(zero=3, dp=2), pytest.param(ParallelConfig(pp=2), marks=pytest.mark.slow)],
)
def test_objective_plugin_matches_one_process(parallel: ParallelConfig) -> None:
    """Its backward reads the table of the head again, which ZeRO-3 must gather."""
    case = layout_case(PLAIN, parallel, 2)
    train = replace(case.run.train, loss_plugin=name_of(SquaredLosses))
    case = replace(case, run=replace(case.run, train=train))
    assert [each for each in compare_with_one_process(case) if not each.holds] == []


def test_objective_plugin_with_wrong_loss_terms_is_rejected() -> None:
    run = tiny_run({"train.loss_plugin": name_of(MisnamedLosses)})
    with pytest.raises(ConfigError, match="the first must be named loss"):
        build_objective(run)
    run = tiny_run({"train.loss_plugin": name_of(WithoutTerms)})
    with pytest.raises(ConfigError, match="it must map each name to a LossTerm"):
        build_objective(run)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (UndeclaredLosses, "returned the losses ['loss', 'token_loss']"),
        (LossOfEachToken, "returned the loss loss with shape [24]. Return the sum"),
        (SingleLoss, "returned Tensor. Return a dict with the sum of each loss: loss, token_loss"),
        (TwoPasses, "computes the losses of depth 0 twice in a microbatch"),
    ],
)
def test_objective_plugin_with_wrong_results_is_rejected(objective: type, message: str) -> None:
    run = tiny_run({"train.loss_plugin": name_of(objective)})
    trainer = build_trainer(run, build_single_rank_mesh(), torch.device("cpu"))
    loader = loader_of(run, trainer.mesh, consumed=0, steps=1)
    with pytest.raises(ConfigError) as raised:
        train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.0)
    assert message in str(raised.value)


class OneSample:
    """Dataset of another package."""

    def __init__(self, data: DataConfig, *, split: str, num_samples: int | None, **_: Any) -> None:
        self.split, self.num_samples = split, num_samples


def test_dataset_plugin_builds_every_requested_split() -> None:
    counts = {"train_samples": 3, "valid_samples": None, "test_samples": 0}
    data = DataConfig(plugin=name_of(OneSample))
    splits: Any = build_datasets(
        data, SampleSettings(seq_len=4, seed=1, vocab_size=9, eod=0), **counts
    )
    assert (splits.train.split, splits.train.num_samples) == ("train", 3)
    assert (splits.valid.split, splits.valid.num_samples) == ("valid", None)
    assert splits.test is None


def test_schedule_plugin_sets_the_learning_rate() -> None:
    schedule = replace(tiny_run().schedule, plugin=name_of(constant_rate))
    lengths = ScheduleLengths(warmup=1, decay=2, wsd_decay=0, total=2)
    assert learning_rate(schedule, 0, lengths) == 0.25


def test_a_file_imports_no_code(tmp_path: Path) -> None:
    file, setting = tmp_path / "run.yaml", "model.plugins.attention"
    save_yaml(replace(tiny_run(), model=replace(tiny_run().model, plugins=PLUGIN.plugins)), file)
    with pytest.raises(ConfigError) as caught:
        resolve_run(str(file), {})
    assert f"{setting}={EXAMPLE} names a module" in str(caught.value)
    assert f"--{setting} {EXAMPLE}" in str(caught.value)
    assert resolve_run(str(file), {setting: EXAMPLE}).model.plugins.attention == EXAMPLE
    reject_module_names(tiny_run(), "run.yaml")


def test_unknown_plugins_are_rejected_with_the_installed_ones() -> None:
    run = replace(tiny_run(), model=replace(tiny_run().model, plugins=ModelPlugins(norm="none")))
    with pytest.raises(ConfigError, match=r"model.plugins.norm=none is not an installed plug-in"):
        check_run(run, 1)
    with pytest.raises(ConfigError, match=r"optim.plugin=no.such:One cannot be loaded \(Module"):
        load_plugin("optimizer", "no.such:One")


def test_loss_plugin_rejects_options_of_the_built_in_loss() -> None:
    run = tiny_run({"train.loss_plugin": name_of(SquaredLosses), "train.z_loss": "0.5"})
    with pytest.raises(ConfigError, match=r"with train.z_loss=0.5: these options belong to"):
        check_run(run, 1)


@pytest.mark.slow
def test_installed_plugin_trains_under_tp(tmp_path: Path) -> None:
    """The example package is built and installed into a folder, and trained and resumed by name."""
    package, target = tmp_path / "package", tmp_path / "target"
    shutil.copytree(ROOT / "examples" / "plugin", package)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "--no-build-isolation", "--target", str(target), str(package)], check=True
    )
    run = tiny_run(
        {
            "parallel.tp": "2",
            "model.plugins.attention": "value_residual",
            "train.callbacks": "lowest_loss",
        }
    )
    save_yaml(run, tmp_path / "run.yaml")
    command = [sys.executable, "-m", "megalith", "train", "run.yaml", "--nproc", "2"]
    environment = os.environ | {"PYTHONPATH": f"{target}{os.pathsep}{ROOT}"}
    for steps in ("4", "8"):
        done = subprocess.run(
            [*command, "--train.steps", steps],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "tiny"
    assert (folder / "checkpoints" / "step_0000008" / "manifest.json").exists()
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "lowest_loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 9))
    losses = [row["loss"] for row in rows]
    assert [row["lowest_loss"] for row in rows] == pytest.approx(
        [min(losses[: number + 1]) for number in range(8)]
    )
