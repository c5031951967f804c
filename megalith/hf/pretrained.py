"""Sources of weights: a checkpoint, the newest checkpoint of a run, a Hugging Face folder, or
adapters with their base model."""

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from megalith import storage
from megalith.checkpoint.format import MANIFEST, CheckpointEntry, step_folders
from megalith.checkpoint.iterations import TRACKER
from megalith.checkpoint.keys import (
    EMA,
    MODEL,
    check_patterns,
    compare_keys,
    differences,
    log_load_report,
    select_rejected_keys,
    weights_key,
)
from megalith.checkpoint.load import (
    STRICT,
    Checkpoint,
    WeightsRole,
    copy_auxiliary_files_locally,
    find_latest,
    open_checkpoint,
)
from megalith.checkpoint.manifest import find_saved_again
from megalith.checkpoint.readers import mark_reading
from megalith.config.checkpoint import CheckpointConfig, NewRowInit
from megalith.config.data import TokenizerConfig
from megalith.config.model import ModelConfig
from megalith.config.plugins import reject_module_names
from megalith.config.train import list_checkpoint_folders
from megalith.config.tree import differences as differences_of
from megalith.config.tree import from_dict, parse_stored_settings
from megalith.data.huggingface import is_gpt2
from megalith.data.tokenizer import locate_copied_tokenizer, main_file
from megalith.data.tokenizer_formats import is_sentencepiece
from megalith.errors import CheckpointError, ConfigError, did_you_mean
from megalith.hf.family import Family, canonical
from megalith.hf.folder import (
    CONFIG,
    GENERATION,
    LICENSES,
    TOKEN_IDS,
    TOKENIZER_FILES,
    HFSource,
    HuggingFaceFolder,
    Weights,
    find_exporting_family,
    list_auxiliary_files,
    parse_hf_source,
    read_json,
)
from megalith.hf.megatron_checkpoint import (
    MegatronCheckpoint,
    is_megatron,
    locate_megatron,
    open_megatron,
)
from megalith.hf.peft import (
    ADAPTER_CONFIG,
    RECORD,
    AdaptedWeights,
    Adapters,
    check_adapter_names,
    checkpoint_adapters,
    fingerprint,
    peft_adapters,
    read_peft_config,
)
from megalith.hf.release import parameters
from megalith.hf.store_source import check_downloaded, download_foreign_folder
from megalith.object_store import StorePath, is_url
from megalith.parallel.group import Group, raise_on_all_ranks
from megalith.plan.shards import Box
from megalith.storage import StoragePath

RUNS = Path("runs")

_log = logging.getLogger(__name__)

FORCE_LOAD_BALANCING = "forced_choices"
"""Key in the state of a checkpoint: settings that selected experts at random in any step that led
to its weights."""

HF_SOURCE = "huggingface"
"""Key in the state of a checkpoint: the Hugging Face model that its weights were converted from
(`HFSource`)."""

FREE = ("init_std",)
"""Settings that affect training only, in addition to those without canonical form; they may differ
when weights are loaded."""


@dataclass(frozen=True, slots=True)
class CheckpointWeights:
    """Weights of a checkpoint, read by parameter name."""

    checkpoint: Checkpoint
    role: WeightsRole = "param"
    """What is read: the weights, or their moving average, which parameters that were not trained
    do not have."""

    def dtype(self, parameter: str) -> torch.dtype:
        """Return the dtype in which the parameter is stored."""
        return self.checkpoint.dtype(f"model.{parameter}")

    def read(self, parameter: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Return a box of a parameter; from its master weights if the dtype differs from the stored
        one."""
        average = f"{EMA}{parameter}"
        if self.role == "ema" and average in self.checkpoint.manifest.tensors:
            view = self.checkpoint.view(average, box)
            return self.checkpoint.read(average, box, dtype) if view is None else view.to(dtype)
        master = f"optimizer.master.{parameter}"
        is_exact = dtype == self.dtype(parameter) or master not in self.checkpoint.manifest.tensors
        key = f"model.{parameter}" if is_exact else master
        view = self.checkpoint.view(key, box)
        return self.checkpoint.read(key, box, dtype) if view is None else view.to(dtype)


@dataclass(frozen=True, slots=True)
class Pretrained:
    """An opened model with weights: its configs and records, and a reader of its tensors."""

    path: Path
    """The checkpoint or folder; of a checkpoint in a store, a local copy of the files that are not
    tensors."""

    model: ModelConfig
    tokenizer: TokenizerConfig
    """The tokenizer it was trained with; `null` if there is none."""

    weights: Weights
    token_ids: Mapping[str, Any]  # JSON
    """bos_token_id, eos_token_id and pad_token_id, where known."""

    settings: Mapping[str, Any] = field(default_factory=dict)  # JSON
    """config.yaml of the run that trained it, unchanged; empty for other folders."""

    force_load_balancing: tuple[str, ...] = ()
    """Settings that selected experts at random during training."""

    hf_source: HFSource | None = None
    """The Hugging Face model that it is or was converted from; None: unknown, or trained from
    scratch."""

    @property
    def location(self) -> str:
        """Absolute path of the checkpoint or folder, or its URL."""
        weights = self.weights
        path = weights.path if isinstance(weights, AdaptedWeights) else self.path
        return str((self.checkpoint.path if self.checkpoint is not None else path).absolute())

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint, or None if the weights have another source."""
        return self.weights.checkpoint if isinstance(self.weights, CheckpointWeights) else None

    def warnings(self) -> list[str]:
        """Return warnings for users of the model, one per line."""
        checkpoint = self.checkpoint
        own = checkpoint.warnings() if isinstance(checkpoint, MegatronCheckpoint) else []
        if not self.force_load_balancing:
            return own
        settings = ", ".join(self.force_load_balancing)
        return [
            *own,
            f"its experts were selected at random during training ({settings}): use it only to "
            "measure speed",
        ]

    def tuning(self) -> Mapping[str, Any]:  # JSON
        """Return `data.sft` of the run that trained it, if it was trained on conversations."""
        sft = _get_setting(self.settings, "data", "sft")
        used = isinstance(sft, dict) and (
            sft.get("path") or sft.get("mock_conversations") or sft.get("template")
        )
        return sft if isinstance(sft, dict) and used else {}

    def source_folders(self) -> list[Path]:
        """Return the existing folders of the models that this one was trained from, nearest
        first."""
        load = _get_setting(self.settings, "checkpoint", "load")
        if isinstance(self.weights, AdaptedWeights):
            load = str(self.weights.base_path)
        folders: list[Path] = []
        while (
            isinstance(load, str)
            and (path := _locate_or_none(load)) is not None
            and path not in (self.path, *folders)
        ):
            folders.append(path)
            load = _get_setting(_raw_settings(path), "checkpoint", "load")
        return folders

    def generation_file(self) -> Path | None:
        """Return generation_config.json of the nearest model that has one, if that has the same
        tokenizer.

        Raises:
            CheckpointError: a field of it has an invalid value.
        """
        folders = [
            folder
            for folder in (self.path, *self.source_folders())
            if (folder / GENERATION).is_file()
        ]
        if not folders or not self._has_same_tokenizer(folders[0]):
            return None
        file = folders[0] / GENERATION
        if problems := find_generation_problems(read_json(file), self.model.vocab_size):
            raise CheckpointError(
                f"{file}: {' '.join(problems)} Correct the file, or remove it to go without it."
            )
        return file

    def stop_ids(self) -> frozenset[int]:
        """Return the token ids that end a text according to the folder; chat models have
        several."""
        values, file = [self.token_ids.get("eos_token_id")], self.generation_file()
        if file is not None:
            values.append(read_json(file).get("eos_token_id"))
        ids = [item for value in values for item in (value if isinstance(value, list) else [value])]
        return frozenset(item for item in ids if type(item) is int)

    def auxiliary_files(self) -> dict[str, Path]:
        """Return the auxiliary files of the model: tokenizer, generation_config.json, and the
        licenses of all source models.

        Raises:
            DataError: the tokenizer that the model was trained with no longer exists.
        """
        files = list_auxiliary_files(self.path)
        main = main_file(self.tokenizer)
        if main is not None and main.name not in files:
            beside = {
                name: file
                for name, file in list_auxiliary_files(main.parent).items()
                if name in TOKENIZER_FILES
            }
            files = beside | {main.name: main} | files
        for folder in self.source_folders():
            files = {
                name: file
                for name, file in list_auxiliary_files(folder).items()
                if name in LICENSES
            } | files
        generation = self.generation_file()
        return files if generation is None else files | {GENERATION: generation}

    def _has_same_tokenizer(self, folder: Path) -> bool:
        """Return whether a folder has the tokenizer of this model, or none."""
        if folder == self.path:
            return True
        main = main_file(self.tokenizer)
        if main is None:
            return not (
                (folder / "tokenizer.json").is_file() or is_sentencepiece(folder) or is_gpt2(folder)
            )
        tokenizer_file = folder / main.name
        return not tokenizer_file.is_file() or storage.read_bytes(
            tokenizer_file
        ) == storage.read_bytes(main)


GENERATION_RANGES: Mapping[str, tuple[type, float, float]] = {
    "temperature": (float, 0.0, math.inf),
    "top_p": (float, 0.0, 1.0),
    "min_p": (float, 0.0, 1.0),
    "typical_p": (float, 0.0, 1.0),
    "repetition_penalty": (float, 0.0, math.inf),
    "top_k": (int, 0, math.inf),
    "max_length": (int, 1, math.inf),
    "max_new_tokens": (int, 1, math.inf),
    "num_beams": (int, 1, math.inf),
}
"""Numeric field of generation_config.json -> its type, smallest and largest value."""


def find_generation_problems(raw: Mapping[str, Any], vocab_size: int) -> list[str]:  # Any: JSON
    """Return the problems with the fields of a generation_config.json, as messages; null is valid.

    >>> print(*find_generation_problems({"top_p": 2, "eos_token_id": [5, "x"]}, 8), sep="\\n")
    eos_token_id=[5, 'x']: expected token ids from 0 to 7.
    top_p=2: expected a number from 0.0 to 1.0.
    """
    problems = []
    eos = raw.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        problems.append(f"eos_token_id={eos!r:.60}: expected token ids from 0 to {vocab_size - 1}.")
    for name, (kind, low, high) in GENERATION_RANGES.items():
        value = raw.get(name)
        right_type = type(value) in (int, float) if kind is float else type(value) is int
        if value is not None and not (right_type and low <= value <= high and math.isfinite(value)):
            limits = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
            problems.append(
                f"{name}={value!r:.60}: expected a{'' if kind is float else ' whole'} number "
                f"{limits}."
            )
    if raw.get("do_sample") not in (None, True, False):
        problems.append(f"do_sample={raw['do_sample']!r:.60}: expected true or false.")
    return problems


def _locate_in_store(source: StorePath) -> StoragePath:
    """Return the checkpoint that a URL names, or the newest one under it; of a Hugging Face or
    Megatron folder a local copy.

    Raises:
        CheckpointError: there is none.
    """
    try:
        path = find_saved_again(source)
        if storage.exists(path / MANIFEST):
            return path
        for folder in (source / "checkpoints", source):
            if (latest := find_latest(folder)) is not None:
                return latest
        downloaded = download_foreign_folder(source)
        names = storage.list_names(source)
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read ({error.strerror}).") from error
    if downloaded is not None:
        return downloaded
    shown = ", ".join(names[:6]) or "nothing"
    raise CheckpointError(
        f"{source} has no checkpoint (found: {shown}). Use a checkpoint.folder of a run, a "
        f"step_NNNNNNN under it, a Megatron folder with {TRACKER}, or a Hugging Face folder with "
        f"{CONFIG}."
    )


def locate_local_source(source: str) -> Path:
    """Return `locate_source(source)` of adapters, which are read from local folders only.

    Raises:
        CheckpointError: there is none, or it is a URL.
    """
    path = locate_source(source)
    if isinstance(path, StorePath):
        raise CheckpointError(
            f"{source}: adapters are read from local folders only. Copy them to a folder, and pass "
            "that."
        )
    return path


def locate_source(source: str) -> StoragePath:
    """Return the checkpoint or Hugging Face folder named by `source`; for a run its newest
    checkpoint, for a folder of Megatron checkpoints the one that its tracker names.

    Called on one rank.

    Raises:
        CheckpointError: there is none.
    """
    path = storage.parse_path(source)
    if isinstance(path, StorePath):
        return _locate_in_store(path)
    if not path.exists() and (RUNS / source).is_dir():
        path = RUNS / source
    if path.is_file():
        raise CheckpointError(
            f"{source} is a file. Pass the folder of a run, checkpoint or model, such as "
            f"{path.parent} if it is one."
        )
    if not path.is_dir():
        locate_megatron(path)  # an iteration that does not exist: the error lists the others
        advice = did_you_mean(source, storage.list_names(RUNS)) or ""
        raise CheckpointError(
            f"{source}: no such folder, neither as a path nor under {RUNS}/.{advice} "
            f"Pass the folder of a run, checkpoint or model."
        )
    if any((path / name).exists() for name in (MANIFEST, CONFIG, ADAPTER_CONFIG)):
        return path
    if (megatron := locate_megatron(path)) is not None:
        return megatron
    for folder in (*list_checkpoint_folders(path), path):
        if step_folders(folder) and (latest := find_latest(folder)) is not None:
            return latest
    shown = ", ".join(storage.list_names(path)[:6]) or "nothing"
    raise CheckpointError(
        f"{path} has no checkpoint (found: {shown}). Use the folder of a run that has saved one, a "
        f"checkpoint, a Megatron folder with {TRACKER}, or a Hugging Face folder with {CONFIG}."
    )


def check_source_on_machine(source: str, path: StoragePath) -> None:
    """Check that this rank's machine has what `locate_source` has downloaded on that of rank 0.

    Raises:
        CheckpointError: it has not.
    """
    if isinstance(path, Path) and is_url(source) and not source.startswith("file://"):
        check_downloaded(source, path)


def open_pretrained(
    path: StoragePath,
    *,
    base: str | None = None,
    role: WeightsRole = "param",
    vocab_size: int | None = None,
) -> Pretrained:
    """Open the model in a folder returned by `locate_source`; adapters are added to `base`, or if
    it is unset to the base that they name. With `role` ema the weights are their moving average.
    `vocab_size`: that of a Megatron checkpoint which states only the padded one.

    Raises:
        CheckpointError: it is damaged, incomplete, or of an unsupported architecture; or it has no
            moving average.
    """
    if isinstance(path, Path) and not (path / MANIFEST).exists():
        if role == "ema":
            raise CheckpointError(
                f"--role=ema: {path} has weights only. Use --role param, or a run that was trained "
                "with train.ema.decay."
            )
        if is_megatron(path):
            return open_pretrained_checkpoint(open_megatron(path, vocab_size=vocab_size))
        if (path / ADAPTER_CONFIG).exists():
            return _open_peft(path, base)
        if (path / CONFIG).exists():
            return _open_folder(path)
    return open_pretrained_checkpoint(open_checkpoint(path), base=base, role=role)


def open_pretrained_checkpoint(
    checkpoint: Checkpoint, *, base: str | None = None, role: WeightsRole = "param"
) -> Pretrained:
    """Return the model in an opened checkpoint; `base` and `role` as in `open_pretrained`.

    Raises:
        CheckpointError: it does not describe a model, its adapters have another base, or it has no
            moving average.
    """
    if role == "ema":
        checkpoint.require_ema()
    if RECORD in checkpoint.state:
        return _open_adapted(checkpoint, base)
    model, tokenizer = _read_configs(checkpoint)
    folder = checkpoint.local_folder()
    tokenizer = locate_copied_tokenizer(tokenizer, folder)
    ids = checkpoint.state.get("token_ids")
    token_ids = ids if isinstance(ids, dict) else {}
    return Pretrained(
        folder,
        model,
        tokenizer,
        CheckpointWeights(checkpoint, role),
        token_ids,
        _raw_settings(folder),
        trained_with_forced_balancing(checkpoint, model),
        read_hf_source(checkpoint),
    )


def trained_with_forced_balancing(
    checkpoint: Checkpoint | None, model: ModelConfig
) -> tuple[str, ...]:
    """Return the settings that selected experts at random before a checkpoint, and those that do in
    `model`."""
    stored = [] if checkpoint is None else checkpoint.state.get(FORCE_LOAD_BALANCING, [])
    current = () if model.moe is None else model.moe.router.list_benchmark_settings()
    return tuple(dict.fromkeys((*(map(str, stored) if isinstance(stored, list) else ()), *current)))


def read_hf_source(checkpoint: Checkpoint | None) -> HFSource | None:
    """Return the Hugging Face model that a checkpoint was converted or trained from.

    Raises:
        CheckpointError: its record is damaged.
    """
    if checkpoint is None or HF_SOURCE not in checkpoint.state:
        return None
    return parse_hf_source(checkpoint.state[HF_SOURCE], checkpoint.path)


class LoadedWeights(NamedTuple):
    """Records of the weights that were loaded from another model."""

    notes: list[str]
    """Warnings, and allowed differences between the two models, one per line."""

    forced: tuple[str, ...]
    """Settings that selected experts at random during training."""

    hf_source: HFSource | None


def load_pretrained(
    entries: Sequence[CheckpointEntry],
    source: str,
    world: Group,
    *,
    model: ModelConfig,
    rules: CheckpointConfig = STRICT,
    role: WeightsRole = "param",
) -> list[str]:
    """Load weights (roles `param` and `master`) from `source`, and nothing else; with `role` ema
    from their moving average.

    Collective over `world`. Returns warnings and allowed differences between the models, one per
    line.

    Raises:
        CheckpointError: on every rank: there is nothing to load, or the model differs from `model`.
    """
    return load_weights_with_records(
        entries, source, world, model=model, rules=rules, padded=False, role=role
    ).notes


def load_weights_with_records(
    entries: Sequence[CheckpointEntry],
    source: str,
    world: Group,
    *,
    model: ModelConfig,
    rules: CheckpointConfig = STRICT,
    padded: bool = True,
    role: WeightsRole = "param",
) -> LoadedWeights:
    """Load weights like `load_pretrained`, and return their records; with `padded` the vocabulary
    may be padded differently."""
    path = raise_on_all_ranks(lambda: locate_source(source) if world.rank == 0 else None, world)[0]
    assert path is not None
    sources: list[Pretrained] = []
    raise_on_all_ranks(lambda: check_source_on_machine(source, path), world)
    raise_on_all_ranks(
        lambda: sources.append(open_pretrained(path, role=role, vocab_size=model.vocab_size)), world
    )
    opened = sources[0]
    if isinstance(opened.checkpoint, MegatronCheckpoint):
        checkpoint = with_master_weights(opened.checkpoint, world)
        opened = replace(opened, weights=CheckpointWeights(checkpoint))
    notes = check_same_model(opened, model, allow=rules.allow_model_changes, padded=padded)
    same_vocab_size = padded and opened.model.vocab_size == model.vocab_size
    if rules.new_rows != "zero":
        add_rows(opened, model, rules.new_rows, setting=f"checkpoint.new_rows={rules.new_rows}")
    with mark_sources([opened] if world.rank == 0 else []):
        load_weights(
            opened,
            entries,
            world,
            rules=rules,
            vocab_size=model.vocab_size if same_vocab_size else None,
        )
    return LoadedWeights(
        [*opened.warnings(), *notes], opened.force_load_balancing, opened.hf_source
    )


def mark_sources(models: Sequence[Pretrained]) -> contextlib.ExitStack:
    """Announce that this process reads checkpoints of other runs, until the end of `with`."""
    marks = contextlib.ExitStack()
    for model in models:
        weights = model.weights
        if isinstance(weights, AdaptedWeights):
            marks.enter_context(mark_reading(weights.path))
            weights = weights.base
        if isinstance(weights, CheckpointWeights):
            marks.enter_context(mark_reading(weights.checkpoint.path))
    return marks


def with_master_weights(checkpoint: MegatronCheckpoint, world: Group) -> MegatronCheckpoint:
    """Return a Megatron checkpoint with its fp32 master weights; without them, and with a warning,
    if its optimizer state cannot be read. Collective over `world`."""
    try:
        return with_optimizer(checkpoint, world)
    except CheckpointError as error:
        if world.rank == 0:
            _log.warning("only the weights are loaded, not the master weights: %s", error)
        return checkpoint


def with_optimizer(checkpoint: MegatronCheckpoint, world: Group) -> MegatronCheckpoint:
    """Return a Megatron checkpoint with its optimizer state. Collective over `world`.

    Raises:
        CheckpointError: on every rank: the state cannot be read.
    """
    opened: list[MegatronCheckpoint] = []

    def open_optimizer() -> None:
        opened.append(checkpoint.with_optimizer(rank=world.rank, world_size=world.size))

    raise_on_all_ranks(open_optimizer, world)
    return opened[0]


def add_rows(opened: Pretrained, model: ModelConfig, rows: NewRowInit, *, setting: str) -> None:
    """Set how rows of `model`'s vocabulary tables are initialized that a Hugging Face folder lacks;
    `setting` requests it.

    Raises:
        CheckpointError: the source is no Hugging Face folder, or lacks no rows.
    """
    if not isinstance(opened.weights, HuggingFaceFolder):
        raise CheckpointError(
            f"{setting}: {opened.path} is not a Hugging Face folder, so no rows are added to its "
            "tables. Remove the setting."
        )
    if not opened.weights.count_new_rows(parameters(model)):
        raise CheckpointError(
            f"{setting}: {opened.path} already has all {model.vocab_size} rows. "
            f"Remove the setting, or set a larger vocabulary."
        )
    opened.weights.new_rows = rows


def load_weights(
    opened: Pretrained,
    entries: Sequence[CheckpointEntry],
    world: Group,
    *,
    rules: CheckpointConfig = STRICT,
    vocab_size: int | None = None,
) -> None:
    """Load weights (roles `param` and `master`) from an opened model. Collective over `world`.

    vocab_size: if given, tables may have other numbers of padding rows beyond it.

    Raises:
        CheckpointError: on every rank: tensors are damaged, missing, unexpected or have another
            shape.
    """
    if opened.checkpoint is None:
        folder = opened.weights
        assert isinstance(folder, HuggingFaceFolder | AdaptedWeights)
        _fill_from_folder(entries, folder, world, rules)
    else:
        assert isinstance(opened.weights, CheckpointWeights)
        opened.checkpoint.load_into(
            entries,
            world,
            rules=rules,
            purpose="start",
            vocab_size=vocab_size,
            weights_role=opened.weights.role,
        )


def _fill_from_folder(
    entries: Sequence[CheckpointEntry],
    folder: HuggingFaceFolder | AdaptedWeights,
    world: Group,
    rules: CheckpointConfig,
) -> None:
    """Load the entries that `rules` select from a Hugging Face folder, or from a base with
    adapters.

    Raises:
        CheckpointError: on every rank: `rules` do not allow the missing or unexpected tensors, or
            shapes differ.
    """
    folder_keys = {f"{MODEL}{shard.name}" for shard in parameters(folder.model_config)}
    requested_on_ranks = raise_on_all_ranks(
        lambda: [(entry.key, weights_key(entry.key), entry.shard.shape) for entry in entries], world
    )
    requested = {
        key: (weights, shape) for part in requested_on_ranks for key, weights, shape in part
    }
    check_patterns(rules.skip, requested.keys(), folder_keys)
    report = compare_keys(requested, folder_keys, skip=rules.skip, purpose="start")
    rejected = select_rejected_keys(report, rules, "start")
    if rejected.missing_keys or rejected.unexpected_keys:
        raise CheckpointError(
            f"{folder.path} has a different model:\n{differences([], rejected)}\nTo load it, set "
            "model.* "
            f"to the values of {folder.path / CONFIG}."
        )
    filled = [entry for entry in entries if entry.key not in report.missing_keys + report.skipped]
    raise_on_all_ranks(lambda: folder.fill(filled), world)
    if world.rank == 0:
        log_load_report(report, rules, folder.path)


def check_same_model(
    opened: Pretrained, model: ModelConfig, *, allow: Sequence[str] = (), padded: bool = False
) -> list[str]:
    """Return the allowed differences between two models, one per line.

    `allow`: settings or sections, such as `model.rope`; `padded`: the reader of the weights pads
    the vocabulary itself. max_seq_len may increase, and settings of training may differ.

    Raises:
        CheckpointError: there are other differences; all of them are in a table.
    """
    stored, requested = canonical(opened.model), canonical(model)
    repads_vocabulary = isinstance(opened.weights, HuggingFaceFolder) or (
        padded and opened.checkpoint is not None
    )
    if not repads_vocabulary:  # otherwise this run pads the vocabulary itself
        stored = replace(stored, pad_vocab_to_multiple_of=opened.model.pad_vocab_to_multiple_of)
        requested = replace(requested, pad_vocab_to_multiple_of=model.pad_vocab_to_multiple_of)
    changed = [
        (f"model.{path}", old, new)
        for path, old, new in differences_of(stored, requested)
        if not _is_within(path, FREE)
    ]
    changed_paths = {f"model.{path}" for path, _, _ in differences_of(opened.model, model)}
    # the others follow from these, for example head_dim
    changed = [row for row in changed if row[0] in changed_paths] or changed
    allowed = [name for name, _, _ in changed if _is_within(name, allow)]
    if requested.max_seq_len >= stored.max_seq_len and model.positions != "learned":
        # otherwise there are more position embeddings
        allowed.append("model.max_seq_len")
    rejected = [row for row in changed if row[0] not in allowed]
    if rejected:
        names = " ".join(name for name, _, _ in rejected)
        mixture = " To upcycle a dense model, run `megalith convert` with --upcycle."
        raise CheckpointError(
            f"{opened.path} has a different model:\n{_format_table(rejected)}\nTo load it, set "
            "model.* to "
            "its values. To "
            f"change what these weights compute, set checkpoint.allow_model_changes to {names}."
            f"{mixture if stored.moe is None and requested.moe is not None else ''}"
        )
    return [f"{name}: {old} in the checkpoint, {new} in this run" for name, old, new in changed]


def _is_within(path: str, names: Sequence[str]) -> bool:
    """Return whether a dotted setting is one of `names`, or in one of these sections."""
    return any(path == name or path.startswith(f"{name}.") for name in names)


def _format_table(rows: Sequence[tuple[str, object, object]]) -> str:
    """Format rows as a table with the columns field, checkpoint, yours."""
    cells = [
        ("field", "checkpoint", "yours"),
        *((name, str(old), str(new)) for name, old, new in rows),
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(2)]
    return "\n".join(
        f"  {name:<{widths[0]}}  {old:<{widths[1]}}  {new}" for name, old, new in cells
    )


def _open_folder(path: Path) -> Pretrained:
    folder = HuggingFaceFolder(path)
    if (path / "tokenizer.json").is_file() or is_gpt2(path):
        tokenizer = TokenizerConfig(kind="huggingface", path=str(path))
    elif is_sentencepiece(path):
        tokenizer = TokenizerConfig(kind="sentencepiece", path=str(path))
    else:
        tokenizer = TokenizerConfig(kind="null", vocab_size=folder.model_config.vocab_size)
    ids = {name: folder.raw.get(name) for name in TOKEN_IDS}
    return Pretrained(path, folder.model_config, tokenizer, folder, ids, hf_source=folder.source)


def open_adapters(path: Path, *, base: str | None = None) -> Adapters:
    """Open the adapters in a folder returned by `locate_source`, a checkpoint or a PEFT folder.

    PEFT adapters need the parameter names of a model: `base`, unset: the base that they name.

    Raises:
        CheckpointError: there are none, or they are damaged or belong to another model.
    """
    if (path / MANIFEST).exists():
        checkpoint = open_checkpoint(path)
        if RECORD in checkpoint.state:
            return checkpoint_adapters(checkpoint)
    elif (path / ADAPTER_CONFIG).exists():
        opened = _peft_base(path, base)
        return peft_adapters(path, find_export_family(opened), opened.model)
    raise CheckpointError(
        f"{path} holds a model, not adapters. Use a run that trained adapters (lora.rank), or a "
        "PEFT "
        f"folder with {ADAPTER_CONFIG}; to start from a model, set checkpoint.load to it."
    )


def check_has_adapters(source: Pretrained, base: str) -> None:
    """Reject a base for a source without adapters.

    Raises:
        ConfigError: the source has no adapters.
    """
    if not isinstance(source.weights, AdaptedWeights):
        raise ConfigError(
            f"--base={base}: {source.path} holds a model, not adapters. Remove --base, or use a "
            "run that trained adapters."
        )


def read_base_record(path: Path) -> dict[str, str] | None:
    """Return `build_base_record` of the base weights of adapters in a folder.

    None for PEFT adapters that name no existing folder."""
    if (path / MANIFEST).exists():
        record = open_checkpoint(path).state.get(RECORD)
        return (
            {name: str(record[name]) for name in ("base", "fingerprint")}
            if isinstance(record, dict)
            else None
        )
    base_name = (
        read_peft_config(path / ADAPTER_CONFIG).base if (path / ADAPTER_CONFIG).exists() else None
    )
    if not isinstance(base_name, str) or not Path(base_name).is_dir():
        return None
    return build_base_record(open_pretrained(locate_source(base_name)))


def build_base_record(source: Pretrained) -> dict[str, str]:
    """Return the record, for checkpoints of adapters, that identifies their base weights."""
    return {
        "base": source.location,
        "fingerprint": fingerprint(source.weights, source.model),
    }


def check_base_weights(record: Any, source: Pretrained, path: StoragePath) -> None:  # Any: JSON
    """Check that `source` has the base weights of the adapters in the checkpoint `path`.

    Raises:
        CheckpointError: it is another base.
    """
    if (found_fingerprint := fingerprint(source.weights, source.model)) != record["fingerprint"]:
        raise CheckpointError(
            f"{path} holds adapters of another base: they were trained with {record['base']} "
            f"({record['fingerprint']}), but {source.path} is {found_fingerprint}. "
            "Use the weights that they were trained with."
        )


def _open_adapted(checkpoint: Checkpoint, base_folder: str | None) -> Pretrained:
    """Open a checkpoint of adapters as the model that they form with their base weights."""
    record, (model, tokenizer) = checkpoint.state[RECORD], _read_configs(checkpoint)
    folder = checkpoint.local_folder()
    tokenizer = locate_copied_tokenizer(tokenizer, folder)
    base_path = base_folder or str(record["base"])
    if base_folder is None and not is_url(base_path) and not Path(base_path).is_dir():
        raise CheckpointError(
            f"{checkpoint.path} holds adapters, but their base weights are not at {base_path}. "
            "Move them there, or set --base to their folder (checkpoint.load for a run)."
        )
    base = open_pretrained(locate_source(base_path))
    check_same_model(base, model)
    base = replace(base, model=model)  # the run determines the padding of the vocabulary
    check_base_weights(record, base, checkpoint.path)
    adapters = checkpoint_adapters(checkpoint)
    check_adapter_names(adapters, adapters.lora, model)
    weights = AdaptedWeights(checkpoint.path, model, base.weights, base.path, adapters)
    force_load_balancing = tuple(
        dict.fromkeys(
            (*base.force_load_balancing, *trained_with_forced_balancing(checkpoint, model))
        )
    )
    return Pretrained(
        folder,
        model,
        tokenizer,
        weights,
        base.token_ids,
        parse_stored_settings(checkpoint.config_text),
        force_load_balancing,
        base.hf_source,
    )


def _open_peft(path: Path, base_folder: str | None) -> Pretrained:
    """Open a PEFT folder as the model that its adapters form with their base, which must be a local
    folder."""
    base = _peft_base(path, base_folder)
    adapters = peft_adapters(path, find_export_family(base), base.model)
    weights = AdaptedWeights(path, base.model, base.weights, base.path, adapters)
    # the tokenizer is often saved with the adapters
    tokenizer = locate_copied_tokenizer(base.tokenizer, path)
    return Pretrained(
        path,
        base.model,
        tokenizer,
        weights,
        base.token_ids,
        force_load_balancing=base.force_load_balancing,
        hf_source=base.hf_source,
    )


def _peft_base(path: Path, base_folder: str | None) -> Pretrained:
    """Open the base model of the adapters in a PEFT folder.

    Raises:
        CheckpointError: it is not a local folder.
    """
    base_name = base_folder or read_peft_config(path / ADAPTER_CONFIG).base
    if not isinstance(base_name, str) or (base_folder is None and not Path(base_name).is_dir()):
        raise CheckpointError(
            f"{path / ADAPTER_CONFIG}: base_model_name_or_path={base_name!r} is not a local "
            "folder. "
            "Set it, or --base, to the folder of the model that the adapters were trained with."
        )
    return open_pretrained(locate_source(base_name))


def find_export_family(source: Pretrained) -> Family:
    """Return the family in which a model is exported.

    That is the one it was converted from; a model trained from scratch gets the first family that
    can express it.

    Raises:
        ConfigError: no family can express the model, or the one that it was converted from cannot.
    """
    if isinstance(source.weights, HuggingFaceFolder):
        return source.weights.family
    if source.hf_source is None:
        return find_exporting_family(source.model)
    family = source.hf_source.family
    try:
        family.write_config(source.model)
    except ConfigError as error:
        try:
            other = find_exporting_family(source.model)
        except ConfigError:
            raise error from None
        raise ConfigError(
            f"{source.path} cannot be exported as {family.architecture}: {error} Or set "
            f"--family={other.model_type} to export it as {other.architecture}."
        ) from error
    return family


def _locate_or_none(source: str) -> Path | None:
    """Return `locate_source(source)`, or None if the folder no longer exists; of a checkpoint in a
    store, a local copy of the files that are not tensors."""
    try:
        path = locate_source(source)
        return path if isinstance(path, Path) else copy_auxiliary_files_locally(path)
    except CheckpointError:
        return None


def _raw_settings(path: Path) -> Mapping[str, Any]:  # JSON
    """Return config.yaml of a checkpoint; empty if there is none."""
    file = path / "config.yaml"
    try:
        raw = parse_stored_settings(storage.read_bytes(file)) if file.is_file() else None
    except yaml.YAMLError:  # callers that need the model have rejected it
        raw = None
    return raw if isinstance(raw, dict) else {}


def _get_setting(settings: Any, *names: str) -> Any:  # JSON
    """Return a nested setting by its path, or None if it is missing."""
    for name in names:
        settings = settings.get(name) if isinstance(settings, dict) else None
    return settings


def _read_configs(checkpoint: Checkpoint) -> tuple[ModelConfig, TokenizerConfig]:
    """Return the model and tokenizer configs in config.yaml of a checkpoint; other sections are not
    read."""
    try:
        raw = parse_stored_settings(checkpoint.config_text)
        model = from_dict(ModelConfig, raw["model"])
        tokenizer = from_dict(TokenizerConfig, raw.get("tokenizer", {}))
    except (yaml.YAMLError, ConfigError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint.path / 'config.yaml'} does not describe a model ({type(error).__name__}: "
            f"{error}). Use a checkpoint that `megalith train` or `megalith convert` wrote."
        ) from error
    reject_module_names(SimpleNamespace(model=model), str(checkpoint.path))
    return model, tokenizer
