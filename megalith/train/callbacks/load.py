"""Callbacks that a user names, and their settings `callbacks.NAME.field`.

A callback is `package.module:Class` on the command line, or an installed entry point in the
settings. A settings file never names a module.
"""

import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points

from megalith.config.fields import Plain, field_types, range_problems
from megalith.config.train import CALLBACK_GROUP, TrainRun
from megalith.config.tree import build_section, to_dict
from megalith.errors import ConfigError, did_you_mean, raise_all
from megalith.train.callbacks.base import Callback, name_of


def configure_callbacks(run: TrainRun, callbacks: Sequence[Callback]) -> TrainRun:
    """Set `config` of the callbacks that the settings `callbacks.NAME` name; return the run with
    the defaults of these settings filled in.

    Raises:
        ConfigError: there is no such callback or setting, or a value is not valid; all problems
            together.
    """
    by_name = {name_of(callback): callback for callback in callbacks}
    problems: list[str] = []
    for name, values in run.callbacks.items():
        if values is None or name in by_name:
            continue
        problems.append(
            f"callbacks.{name}: this run has no callback of this name."
            f"{did_you_mean(name, by_name)} Add it with --callback package.module:Class or "
            f"train.callbacks, or remove its settings with --callbacks.{name} none."
        )
    for name, callback in by_name.items():
        problems += _configure(callback, f"callbacks.{name}", run.callbacks.get(name) or {})
    raise_all(problems)
    resolved: dict[str, dict[str, Plain] | None] = {
        name: to_dict(by_name[name].config)
        for name, values in run.callbacks.items()
        if values is not None
    }
    return replace(run, callbacks=resolved)


def _configure(callback: Callback, path: str, given: Mapping[str, Plain]) -> list[str]:
    """Set `config` of a callback to its values with those of the settings; return the problems."""
    config_class = type(callback).Config
    names = [*field_types(config_class)]
    listed = ", ".join(f"{path}.{name}" for name in names)
    problems = [
        f"{path}.{name}={value}: the callback has no such setting."
        f"{did_you_mean(name, names)} {f'Use one of {listed}' if names else 'It has none'}."
        for name, value in given.items()
        if name not in names
    ]
    own = to_dict(callback.config) if "config" in vars(callback) else {}
    values = own | {name: value for name, value in given.items() if name in names}
    config = build_section(config_class, values, path, problems)
    if config is not None:
        problems += range_problems(config, path)
        callback.config = config
    return problems


def load_callbacks(names: Sequence[str]) -> list[Callback]:
    """Import and create the callbacks of `--callback`, each `package.module:Class`.

    The current folder is searched after the installed packages.

    Raises:
        ConfigError: a name is not of this form, its module cannot be imported, or its class is not
            a callback that can be created without arguments.
    """
    if names and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return [_create(_import_class(name), f"--callback={name}") for name in names]


def load_installed_callbacks(names: Sequence[str]) -> list[Callback]:
    """Create the callbacks of `train.callbacks`, which are installed entry points; the rules have
    checked the names.

    Raises:
        ConfigError: the object of an entry point is not a callback class.
    """
    points = {point.name: point for point in entry_points(group=CALLBACK_GROUP)}
    return [_create(points[name].load(), f"train.callbacks={name}") for name in names]


def _import_class(name: str) -> object:
    module_name, colon, class_name = name.partition(":")
    if not (colon and module_name and class_name):
        raise ConfigError(
            f"--callback={name} does not name a class. Use --callback package.module:Class; entry "
            "points of installed packages are named in train.callbacks."
        )
    if module_name.startswith("."):
        raise ConfigError(
            f"--callback={name}: a relative module name has no package that it refers to. Use "
            f"--callback {name.lstrip('.')}."
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"--callback={name}: importing {module_name} failed: {error}. Install "
                f"{error.name}, or remove the option."
            ) from error
        raise ConfigError(
            f"--callback={name}: there is no module {error.name}."
            f"{did_you_mean(error.name, _list_modules(error.name))} It must be installed or in the "
            "current folder."
        ) from error
    classes = [
        each
        for each, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Callback) and value is not Callback
    ]
    if not hasattr(module, class_name):
        raise ConfigError(
            f"--callback={name}: {module_name} has no {class_name}."
            f"{did_you_mean(class_name, classes)} Use one of its callbacks: "
            f"{', '.join(classes) or 'it has none'}."
        )
    return getattr(module, class_name)


def _list_modules(name: str) -> list[str]:
    """Return the modules of the package of `name`, or the top-level modules."""
    package, dot, _ = name.rpartition(".")
    path = getattr(sys.modules.get(package), "__path__", None) if dot else None
    return [f"{package}{dot}{module.name}" for module in pkgutil.iter_modules(path)]


def _create(cls: object, source: str) -> Callback:
    if not (inspect.isclass(cls) and issubclass(cls, Callback)):
        raise ConfigError(
            f"{source} is not a subclass of megalith.train.callbacks.base.Callback. Use a class "
            "that is derived from it."
        )
    required = [
        parameter.name
        for parameter in inspect.signature(cls).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if required:
        raise ConfigError(
            f"{source} cannot be created without arguments: {cls.__name__} requires "
            f"{', '.join(required)}. Set defaults for them, or pass the callback to run_training."
        )
    return cls()
