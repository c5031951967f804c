"""Plug-ins by name: parts of a model, losses, datasets, optimizers and schedules of other packages.

A name is an installed entry point of the group `megalith.KIND`, or `package.module:name`. Only the
command line and Python code may name a module: a settings file or a checkpoint imports no code
unless the user repeats the name or has installed the package that declares the entry point.
"""

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, get_args

from megalith.errors import ConfigError, did_you_mean

PluginKind = Literal[
    "attention",
    "mlp",
    "norm",
    "activation",
    "block",
    "loss",
    "dataset",
    "optimizer",
    "schedule",
]
KINDS: tuple[PluginKind, ...] = get_args(PluginKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlugins:
    """Parts of the model from other packages: installed entry points, or on the command line
    package.module:name."""

    attention: str | None = None
    """Attention of the layers, built as Class(name, config, context). Unset: built in."""

    mlp: str | None = None
    """MLP of the layers without experts, built as Class(name, config, context). Unset: built in."""

    norm: str | None = None
    """Norm, a subclass of megalith.nn.norm.Norm. Unset: `norm`."""

    activation: str | None = None
    """Activation function of dense MLPs: [t, f], or [t, 2 f] with model.gated, to [t, f].
    Unset: `activation`."""

    block: str | None = None
    """Layer class of layers with attention and MLP, a subclass of megalith.nn.layer.Layer.
    Unset: `block`."""


SETTINGS: Mapping[str, PluginKind] = {
    "model.plugins.attention": "attention",
    "model.plugins.mlp": "mlp",
    "model.plugins.norm": "norm",
    "model.plugins.activation": "activation",
    "model.plugins.block": "block",
    "train.loss_plugin": "loss",
    "data.plugin": "dataset",
    "optim.plugin": "optimizer",
    "schedule.plugin": "schedule",
}
"""Kind of plug-in that each setting names."""


def installed_plugins(kind: PluginKind) -> Mapping[str, EntryPoint]:
    """Return the plug-ins of installed packages by name, without importing them."""
    return {point.name: point for point in entry_points(group=f"megalith.{kind}")}


@lru_cache
def load_plugin(
    kind: PluginKind, name: str
) -> Any:  # Any: a class or a function of another package
    """Import the plug-in of that name.

    Raises:
        ConfigError: it does not exist, or its code cannot be imported.
    """
    setting = next(setting for setting, of in SETTINGS.items() if of == kind)
    if ":" not in name and name not in installed_plugins(kind):
        raise ConfigError(_unknown_plugin(setting, name))
    try:
        if ":" not in name:
            return installed_plugins(kind)[name].load()
        module, _, attribute = name.partition(":")
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # as for `python FILE`: the user names the module
        return getattr(import_module(module), attribute)
    except Exception as error:  # another package's code may fail in any way
        raise ConfigError(
            f"{setting}={name} cannot be loaded ({type(error).__name__}: {error}). Install the "
            "package that provides it, or correct the name."
        ) from error


def used_plugins(run: object) -> dict[str, str]:
    """Return the plug-in names that a run sets, by setting; `run` may be only a part of a run, such
    as an object with `model`."""
    names: dict[str, str] = {}
    for setting in SETTINGS:
        value = run
        for field in setting.split("."):
            value = getattr(value, field, None)
        if isinstance(value, str):
            names[setting] = value
    return names


def plugin_problems(run: object) -> list[str]:
    """Return one error text for each plug-in name that is no installed entry point."""
    return [
        _unknown_plugin(setting, name)
        for setting, name in used_plugins(run).items()
        if ":" not in name and name not in installed_plugins(SETTINGS[setting])
    ]


def reject_module_names(run: object, source: str, allowed: Collection[str] = ()) -> None:
    """Reject plug-ins that a file names by module, except for the settings `allowed`, which the
    user has given on the command line.

    Raises:
        ConfigError: the file names a module.
    """
    for setting, name in used_plugins(run).items():
        is_allowed = any(setting == given or setting.startswith(f"{given}.") for given in allowed)
        if ":" in name and not is_allowed:
            raise ConfigError(
                f"{source}: {setting}={name} names a module, and a file may not import code. To "
                f"allow it, repeat it on the command line (--{setting} {name}), or install a "
                f"package with an entry point of the group megalith.{SETTINGS[setting]} and use "
                "the entry point's name."
            )


def _unknown_plugin(setting: str, name: str) -> str:
    installed = sorted(installed_plugins(SETTINGS[setting]))
    return (
        f"{setting}={name} is not an installed plug-in.{did_you_mean(name, installed)} Use an "
        f"entry point of the group megalith.{SETTINGS[setting]} (installed: "
        f"{', '.join(installed) or 'none'}), or package.module:name on the command line."
    )
