"""The root config of a run, and properties of every setting."""

import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest

from megalith.config.fields import describe, setting_names
from megalith.config.train import TrainRun
from megalith.recipes import resolve

SETTINGS = describe(TrainRun)


def test_every_setting_has_a_description() -> None:
    assert [setting.path for setting in SETTINGS if len(setting.doc) < 10] == []


def test_description_of_an_optional_setting_states_what_unset_means() -> None:
    silent = [
        s.path
        for s in SETTINGS
        if not s.required and s.default is None and "unset" not in s.doc.lower()
    ]
    assert silent == []


def test_only_settings_without_a_default_are_required() -> None:
    assert [setting.path for setting in SETTINGS if setting.required] == [
        "name",
        "model.vocab_size",
        "model.hidden_size",
        "model.num_layers",
        "model.num_heads",
        "model.num_kv_heads",
        "model.ffn_hidden_size",
        "model.mla.kv_rank",  # of a model that has latent attention at all
        "model.cross.memory",  # of one that looks a second time
        "model.moe.num_experts",  # of one with experts
        "model.moe.ffn_hidden_size",
        "model.mup.base_hidden_size",  # of one whose first weights follow its width
        "train.steps",
        "train.global_batch_size",
        "train.ema.decay",  # of a run that averages its weights
        "schedule.lr",
        "replica_group.coordinator",  # of a job that trains with others
        "replica_group.id",
        "observe.wandb.project",  # of a run that uses the tracker
        "observe.mlflow.tracking_uri",
        "fault_injector.kind",  # of a run with an injected fault
    ]


def test_no_setting_is_named_like_another_section() -> None:
    names = setting_names(TrainRun)
    assert len(names) == len(set(names))
    sections = {name for name in names if "." not in name}
    assert sections == {"callbacks", "evaluate", "kernels", "name", "seed"}


def test_configs_are_frozen() -> None:
    run = resolve("tiny_cpu")
    with pytest.raises(FrozenInstanceError):
        run.seed = 2  # type: ignore[misc]  # that is the point


def test_configs_recipes_and_plans_load_no_torch() -> None:
    code = (
        "import sys, megalith.config.train, megalith.recipes, megalith.config.tree, "
        "megalith.cli.recipes"
    )
    subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"], check=True)
