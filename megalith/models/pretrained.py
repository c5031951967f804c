"""Where weights come from: a checkpoint of ours, the newest one of a run, or a Hugging Face
folder."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from megalith import storage
from megalith.checkpoint.agree import raise_on_all_ranks
from megalith.checkpoint.boxes import CheckpointEntry
from megalith.checkpoint.format import MANIFEST, step_folders
from megalith.checkpoint.load import STRICT, Checkpoint, find_latest, open_checkpoint
from megalith.checkpoint.strictness import (
    MODEL,
    announce,
    check_patterns,
    differences,
    left_out,
    refused,
    weights_of,
)
from megalith.config.checkpoint import CheckpointConfig, NewRows
from megalith.config.model import ModelConfig
from megalith.config.suggest import did_you_mean
from megalith.config.tokenizer import TokenizerConfig
from megalith.config.tree import differences as differences_of
from megalith.config.tree import from_dict, parse_stored_settings
from megalith.data.huggingface import is_gpt2
from megalith.data.sentencepiece import is_sentencepiece
from megalith.data.tokenizer import brought_along, main_file
from megalith.errors import CheckpointError, ConfigError
from megalith.models.adapters import (
    ADAPTER_CONFIG,
    RECORD,
    AdaptedWeights,
    Adapters,
    check_names,
    checkpoint_adapters,
    fingerprint,
    peft_adapters,
)
from megalith.models.hf import (
    CONFIG,
    GENERATION,
    LICENSES,
    TOKEN_IDS,
    TOKENIZER_FILES,
    HFSource,
    HuggingFaceFolder,
    Weights,
    family_for,
    list_auxiliary_files,
    parse_hf_source,
    read_json,
)
from megalith.models.names import Family
from megalith.models.peft_config import read_peft_config
from megalith.models.release import parameters
from megalith.models.usual import canonical
from megalith.parallel.group import Group
from megalith.plan.shards import Box

RUNS = Path("runs")

FORCE_LOAD_BALANCING = "forced_choices"
"""In the state of a checkpoint: settings under which chance chose experts, in any step that led to
its weights."""

HF_SOURCE = "huggingface"
"""In the state of a checkpoint: the Hugging Face model that its weights were converted from
(`HFSource`)."""

FREE = ("init_std",)
"""Settings that decide how a model learns, not what it computes, beside those that have no
canonical form at all; they may change when weights are taken over."""


@dataclass(frozen=True, slots=True)
class CheckpointWeights:
    """The weights in a checkpoint of ours, by name."""

    checkpoint: Checkpoint

    def dtype(self, parameter: str) -> torch.dtype:
        """As stored."""
        return self.checkpoint.dtype(f"model.{parameter}")

    def read(self, parameter: str, box: Box, dtype: torch.dtype) -> Tensor:
        """A box of a parameter; from its master copy where another dtype than the stored one is
        wanted."""
        master = f"optimizer.master.{parameter}"
        exact = dtype == self.dtype(parameter) or master not in self.checkpoint.manifest.tensors
        key = f"model.{parameter}" if exact else master
        seen = self.checkpoint.view(key, box)
        return self.checkpoint.read(key, box, dtype) if seen is None else seen.to(dtype)


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model with weights, opened: everything about it that is not a tensor, and a way to read
    those."""

    path: Path
    """Of the checkpoint or folder itself."""

    model: ModelConfig
    tokenizer: TokenizerConfig
    """The one it was trained with; `null` where none came with it."""

    weights: Weights
    token_ids: Mapping[str, Any]  # JSON
    """bos_token_id, eos_token_id and pad_token_id, where known."""

    settings: Mapping[str, Any] = field(default_factory=dict)  # JSON
    """config.yaml of the run that made it, as it is there; empty where it is none of ours."""

    force_load_balancing: tuple[str, ...] = ()
    """Settings under which chance chose experts while it was trained."""

    hf_source: HFSource | None = None
    """The Hugging Face model that it is or was converted from; None: unknown, or trained from a
    recipe."""

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Set when it is one of ours."""
        return self.weights.checkpoint if isinstance(self.weights, CheckpointWeights) else None

    def warnings(self) -> list[str]:
        """What anybody who uses the model should know of it, a line each."""
        if not self.force_load_balancing:
            return []
        how = ", ".join(self.force_load_balancing)
        return [
            f"chance chose its experts while it was trained ({how}): use it to measure speed alone"
        ]

    def tuning(self) -> Mapping[str, Any]:  # JSON
        """`data.sft` of the run that made it, if that read conversations."""
        sft = _within_settings(self.settings, "data", "sft")
        used = isinstance(sft, dict) and (
            sft.get("path") or sft.get("mock_conversations") or sft.get("template")
        )
        return sft if isinstance(sft, dict) and used else {}

    def source_folders(self) -> list[Path]:
        """Folders of the models that this one was trained from, nearest first, as far as they are
        still there."""
        load = _within_settings(self.settings, "checkpoint", "load")
        if isinstance(self.weights, AdaptedWeights):
            load = str(self.weights.base_path)
        found: list[Path] = []
        while (
            isinstance(load, str)
            and (path := _located(load)) is not None
            and path not in (self.path, *found)
        ):
            found.append(path)
            load = _within_settings(_raw_settings(path), "checkpoint", "load")
        return found

    def generation_file(self) -> Path | None:
        """The generation_config.json of the nearest model that has one, if its ids are of the same
        tokenizer.

        Raises:
            CheckpointError: a field of it has an invalid value.
        """
        found = [
            folder
            for folder in (self.path, *self.source_folders())
            if (folder / GENERATION).is_file()
        ]
        if not found or not self._reads_like(found[0]):
            return None
        file = found[0] / GENERATION
        if problems := find_generation_problems(read_json(file), self.model.vocab_size):
            raise CheckpointError(
                f"{file}: {' '.join(problems)} Correct the file, or remove it to go without it."
            )
        return file

    def stop_ids(self) -> frozenset[int]:
        """PackedSeqParams that end a text, as the folder itself says: chat models have several."""
        found, file = [self.token_ids.get("eos_token_id")], self.generation_file()
        if file is not None:
            found.append(read_json(file).get("eos_token_id"))
        ids = [item for value in found for item in (value if isinstance(value, list) else [value])]
        return frozenset(item for item in ids if type(item) is int)

    def auxiliary_files(self) -> dict[str, Path]:
        """Files that go with the weights: tokenizer, generation_config.json, licenses of all they
        were made from.

        Raises:
            DataError: the tokenizer that the model was trained with is gone.
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

    def _reads_like(self, folder: Path) -> bool:
        """Whether the tokenizer in a folder is this model's, as far as there is one."""
        if folder == self.path:
            return True
        main = main_file(self.tokenizer)
        if main is None:
            return not (
                (folder / "tokenizer.json").is_file() or is_sentencepiece(folder) or is_gpt2(folder)
            )
        theirs = folder / main.name
        return not theirs.is_file() or storage.read_bytes(theirs) == storage.read_bytes(main)


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
"""Numbers in generation_config.json -> their type, and the smallest and largest value."""


def find_generation_problems(raw: Mapping[str, Any], vocab_size: int) -> list[str]:  # Any: JSON
    """Return what is wrong with the fields of a generation_config.json, as messages; fields may be
    null.

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


def locate(source: str) -> Path:
    """The checkpoint or Hugging Face folder that a person means: itself, or the newest checkpoint
    of a run.

    Run by one rank.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(source)
    if not path.exists() and (RUNS / source).is_dir():
        path = RUNS / source
    if path.is_file():
        raise CheckpointError(
            f"{source} is a file. Pass the folder of a run, checkpoint or model, such as "
            f"{path.parent} if it is one."
        )
    if not path.is_dir():
        advice = did_you_mean(source, storage.list_names(RUNS)) or ""
        raise CheckpointError(
            f"{source}: no such folder, neither here nor under {RUNS}/.{advice} "
            f"Pass the folder of a run, checkpoint or model."
        )
    if any((path / name).exists() for name in (MANIFEST, CONFIG, ADAPTER_CONFIG)):
        return path
    for folder in (path / "checkpoints", path):
        if step_folders(folder) and (latest := find_latest(folder)) is not None:
            return latest
    shown = ", ".join(storage.list_names(path)[:6]) or "nothing"
    raise CheckpointError(
        f"{path} has no checkpoint (found: {shown}). Use the folder of a run that has saved one, a "
        f"checkpoint, or a Hugging Face folder with {CONFIG}."
    )


def open_pretrained(path: Path, *, base: str | None = None) -> Pretrained:
    """The model in a folder that `locate` gave; adapters make one with their `base`, unset: where
    they say it is.

    Raises:
        CheckpointError: it is damaged, incomplete, or of an architecture that is not supported.
    """
    if not (path / MANIFEST).exists() and (path / ADAPTER_CONFIG).exists():
        return _open_peft(path, base)
    if not (path / MANIFEST).exists() and (path / CONFIG).exists():
        return _open_folder(path)
    checkpoint = open_checkpoint(path)
    if RECORD in checkpoint.state:
        return _open_adapted(checkpoint, base)
    model, tokenizer = _settings(checkpoint)
    tokenizer = brought_along(tokenizer, path)
    ids = checkpoint.state.get("token_ids")
    known = ids if isinstance(ids, dict) else {}
    return Pretrained(
        path,
        model,
        tokenizer,
        CheckpointWeights(checkpoint),
        known,
        _raw_settings(path),
        trained_with_forced_balancing(checkpoint, model),
        read_hf_source(checkpoint),
    )


def trained_with_forced_balancing(
    checkpoint: Checkpoint | None, model: ModelConfig
) -> tuple[str, ...]:
    """Settings under which chance chose experts before a checkpoint, and those under which it does
    in `model`."""
    before = [] if checkpoint is None else checkpoint.state.get(FORCE_LOAD_BALANCING, [])
    now = () if model.moe is None else model.moe.router.forced_settings()
    return tuple(dict.fromkeys((*(map(str, before) if isinstance(before, list) else ()), *now)))


def read_hf_source(checkpoint: Checkpoint | None) -> HFSource | None:
    """Return the Hugging Face model that a checkpoint was converted from, or was trained from.

    Raises:
        CheckpointError: its record is damaged.
    """
    if checkpoint is None or HF_SOURCE not in checkpoint.state:
        return None
    return parse_hf_source(checkpoint.state[HF_SOURCE], checkpoint.path)


class LoadedWeights(NamedTuple):
    """What is known of weights that were loaded from another model."""

    notes: list[str]
    """What to know of the model, and how the two differ where that is allowed, one line each."""

    forced: tuple[str, ...]
    """Settings under which chance chose experts while the weights were trained."""

    hf_source: HFSource | None


def load_pretrained(
    entries: Sequence[CheckpointEntry],
    source: str,
    world: Group,
    *,
    model: ModelConfig,
    rules: CheckpointConfig = STRICT,
) -> list[str]:
    """Fill weights (roles `param` and `master`) from `source`; nothing else of it is taken over.

    Collective over `world`. Returns what to know of the model, and how the two differ where that is
    allowed, one line each.

    Raises:
        CheckpointError: on every rank: there is nothing to load, or it is another model than
        `model`.
    """
    return take_weights(entries, source, world, model=model, rules=rules, padded=False).notes


def take_weights(
    entries: Sequence[CheckpointEntry],
    source: str,
    world: Group,
    *,
    model: ModelConfig,
    rules: CheckpointConfig = STRICT,
    padded: bool = True,
) -> LoadedWeights:
    """The same, which also returns where the weights come from; with `padded` the vocabulary may
    be padded to another multiple than there."""
    path = raise_on_all_ranks(lambda: locate(source) if world.rank == 0 else None, world)[0]
    assert path is not None
    opened = open_pretrained(path)
    notes = compare_models(opened, model, allow=rules.allow_model_changes, padded=padded)
    same = padded and opened.model.vocab_size == model.vocab_size
    if rules.new_rows != "zero":
        add_rows(opened, model, rules.new_rows, setting=f"checkpoint.new_rows={rules.new_rows}")
    fill_from(opened, entries, world, rules=rules, vocab_size=model.vocab_size if same else None)
    return LoadedWeights(
        [*opened.warnings(), *notes], opened.force_load_balancing, opened.hf_source
    )


def add_rows(opened: Pretrained, model: ModelConfig, rows: NewRows, *, setting: str) -> None:
    """Let rows of `model`'s tables that a Hugging Face folder lacks begin so; `setting`: who asks.

    Raises:
        CheckpointError: it is no such folder, or lacks none.
    """
    if not isinstance(opened.weights, HuggingFaceFolder):
        raise CheckpointError(
            f"{setting}: {opened.path} is no Hugging Face folder, and its tables are taken as they "
            "are. Remove it."
        )
    if not opened.weights.added_rows(parameters(model)):
        raise CheckpointError(
            f"{setting}: no rows are new, as {opened.path} has all {model.vocab_size} of them. "
            "Remove it, or set a "
            f"larger vocabulary."
        )
    opened.weights.new_rows = rows


def fill_from(
    opened: Pretrained,
    entries: Sequence[CheckpointEntry],
    world: Group,
    *,
    rules: CheckpointConfig = STRICT,
    vocab_size: int | None = None,
) -> None:
    """Fill weights (roles `param` and `master`) from an opened model. Collective over `world`.

    vocab_size: where given, tables may have other numbers of rows behind it.

    Raises:
        CheckpointError: on every rank: tensors are damaged, missing or surplus, or of other shapes.
    """
    if opened.checkpoint is None:
        folder = opened.weights
        assert isinstance(folder, HuggingFaceFolder | AdaptedWeights)
        _fill_from_folder(entries, folder, world, rules)
    else:
        opened.checkpoint.load_into(
            entries, world, rules=rules, purpose="start", vocab_size=vocab_size
        )


def _fill_from_folder(
    entries: Sequence[CheckpointEntry],
    folder: HuggingFaceFolder | AdaptedWeights,
    world: Group,
    rules: CheckpointConfig,
) -> None:
    """Fill what `rules` ask for from a Hugging Face folder, or from a base with adapters.

    Raises:
        CheckpointError: on every rank: tensors are missing or surplus that `rules` do not let pass,
        or of other shapes.
    """
    theirs = {f"{MODEL}{shard.name}" for shard in parameters(folder.model_config)}
    asked = raise_on_all_ranks(
        lambda: [(entry.key, weights_of(entry.key), entry.shard.shape) for entry in entries], world
    )
    wanted = {key: (weights, shape) for part in asked for key, weights, shape in part}
    check_patterns(rules.skip, wanted.keys(), theirs)
    report = left_out(wanted, theirs, skip=rules.skip, purpose="start")
    wrong = refused(report, rules, "start")
    if wrong.missing_keys or wrong.unexpected_keys:
        raise CheckpointError(
            f"{folder.path} is another model:\n{differences([], wrong)}\nTo load it, set model.* "
            f"to what {folder.path / CONFIG} says."
        )
    filled = [entry for entry in entries if entry.key not in report.missing_keys + report.skipped]
    raise_on_all_ranks(lambda: folder.fill(filled), world)
    if world.rank == 0:
        announce(report, rules, folder.path)


def compare_models(
    opened: Pretrained, model: ModelConfig, *, allow: Sequence[str] = (), padded: bool = False
) -> list[str]:
    """Differences that are allowed, one line each; `allow`: settings or sections, as in
    `model.rope`; `padded`: whoever reads these weights pads the vocabulary as it is padded here.

    A model may be meant for a longer context than it was before, and for other training.

    Raises:
        CheckpointError: some are not; all of these are in a table.
    """
    theirs, ours = canonical(opened.model), canonical(model)
    read_anew = isinstance(opened.weights, HuggingFaceFolder) or (
        padded and opened.checkpoint is not None
    )
    if not read_anew:  # else padding is decided here
        theirs = replace(theirs, pad_vocab_to_multiple_of=opened.model.pad_vocab_to_multiple_of)
        ours = replace(ours, pad_vocab_to_multiple_of=model.pad_vocab_to_multiple_of)
    changed = [
        (f"model.{path}", old, new)
        for path, old, new in differences_of(theirs, ours)
        if not _within(path, FREE)
    ]
    said = {f"model.{path}" for path, _, _ in differences_of(opened.model, model)}
    changed = [
        row for row in changed if row[0] in said
    ] or changed  # others follow from these, as head_dim may
    allowed = [name for name, _, _ in changed if _within(name, allow)]
    if (
        ours.max_seq_len >= theirs.max_seq_len and model.positions != "learned"
    ):  # else there are more vectors to learn
        allowed.append("model.max_seq_len")
    refused_ones = [row for row in changed if row[0] not in allowed]
    if refused_ones:
        names = " ".join(name for name, _, _ in refused_ones)
        mixture = " To make a mixture of a dense model, run `megalith convert` with --upcycle."
        raise CheckpointError(
            f"{opened.path} is another model:\n{_table(refused_ones)}\nTo load it, set model.* to "
            "what is there. To "
            f"change what these weights compute, set checkpoint.allow_model_changes to {names}."
            f"{mixture if theirs.moe is None and ours.moe is not None else ''}"
        )
    return [f"{name}: {old} there, {new} here" for name, old, new in changed]


def _within(path: str, names: Sequence[str]) -> bool:
    """Is a dotted setting one of `names`, or in one of these sections?"""
    return any(path == name or path.startswith(f"{name}.") for name in names)


def _table(rows: Sequence[tuple[str, object, object]]) -> str:
    """Field, checkpoint, yours."""
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


def adapters_in(path: Path, *, base: str | None = None) -> Adapters:
    """The adapters in a folder that `locate` gave, a checkpoint of ours or a PEFT folder.

    Those of PEFT are known by the names of a model: `base`, unset: the one that they name.

    Raises:
        CheckpointError: it has none, or they are damaged, or of another model.
    """
    if (path / MANIFEST).exists():
        checkpoint = open_checkpoint(path)
        if RECORD in checkpoint.state:
            return checkpoint_adapters(checkpoint)
    elif (path / ADAPTER_CONFIG).exists():
        opened = _peft_base(path, base)
        return peft_adapters(path, find_family_of(opened), opened.model)
    raise CheckpointError(
        f"{path} holds a model and no adapters. Use a run that trained some (lora.rank), or a PEFT "
        f"folder with {ADAPTER_CONFIG}; to start from a model, set checkpoint.load to it."
    )


def require_adapters(source: Pretrained, base: str) -> None:
    """Refuse a base for a model that has no use for one.

    Raises:
        ConfigError: it holds no adapters.
    """
    if not isinstance(source.weights, AdaptedWeights):
        raise ConfigError(
            f"--base={base}: {source.path} holds a model and no adapters. Remove --base, or use a "
            "run's."
        )


def base_of_adapters(path: Path) -> dict[str, str] | None:
    """`base_record` of the weights that adapters in a folder belong to; None: PEFT's, which name
    none that is here."""
    if (path / MANIFEST).exists():
        record = open_checkpoint(path).state.get(RECORD)
        return (
            {name: str(record[name]) for name in ("base", "fingerprint")}
            if isinstance(record, dict)
            else None
        )
    named = (
        read_peft_config(path / ADAPTER_CONFIG).base if (path / ADAPTER_CONFIG).exists() else None
    )
    if not isinstance(named, str) or not Path(named).is_dir():
        return None
    return base_record(open_pretrained(locate(named)))


def base_record(source: Pretrained) -> dict[str, str]:
    """Which weights adapters belong to, for the checkpoint that holds them."""
    return {
        "base": str(source.path.absolute()),
        "fingerprint": fingerprint(source.weights, source.model),
    }


def require_base(record: Any, source: Pretrained, path: Path) -> None:  # Any: JSON
    """Refuse to add the adapters in the checkpoint `path` to other weights than those they were
    trained beside.

    Raises:
        CheckpointError: it is another base.
    """
    if (found := fingerprint(source.weights, source.model)) != record["fingerprint"]:
        raise CheckpointError(
            f"{path} holds adapters of another base: they were trained beside {record['base']} "
            f"({record['fingerprint']}"
            f"), and {source.path} is {found}. Use the weights that they were trained with, "
            "wherever they are now."
        )


def _open_adapted(checkpoint: Checkpoint, where: str | None) -> Pretrained:
    """A checkpoint that holds adapters, as the model they make with their base: the weights of
    checkpoint.load."""
    record, (model, tokenizer) = checkpoint.state[RECORD], _settings(checkpoint)
    tokenizer = brought_along(tokenizer, checkpoint.path)
    base_path = where or str(record["base"])
    if where is None and not Path(base_path).is_dir():
        raise CheckpointError(
            f"{checkpoint.path} holds adapters, and the weights that they were trained beside are "
            f"not at {base_path}. "
            "Put them there, or set --base to the folder where they are now (checkpoint.load for "
            "a run)."
        )
    base = open_pretrained(locate(base_path))
    compare_models(base, model)
    base = replace(base, model=model)  # rows that pad the vocabulary are the run's
    require_base(record, base, checkpoint.path)
    adapters = checkpoint_adapters(checkpoint)
    check_names(adapters, adapters.lora, model)
    weights = AdaptedWeights(checkpoint.path, model, base.weights, base.path, adapters)
    forced = tuple(
        dict.fromkeys(
            (*base.force_load_balancing, *trained_with_forced_balancing(checkpoint, model))
        )
    )
    return Pretrained(
        checkpoint.path,
        model,
        tokenizer,
        weights,
        base.token_ids,
        parse_stored_settings(checkpoint.config_text),
        forced,
        base.hf_source,
    )


def _open_peft(path: Path, where: str | None) -> Pretrained:
    """A PEFT folder, as the model that its adapters make with their base, which must be a folder
    here."""
    base = _peft_base(path, where)
    adapters = peft_adapters(path, find_family_of(base), base.model)
    weights = AdaptedWeights(path, base.model, base.weights, base.path, adapters)
    tokenizer = brought_along(
        base.tokenizer, path
    )  # whoever trains adapters often saves it with them
    return Pretrained(
        path,
        base.model,
        tokenizer,
        weights,
        base.token_ids,
        force_load_balancing=base.force_load_balancing,
        hf_source=base.hf_source,
    )


def _peft_base(path: Path, where: str | None) -> Pretrained:
    """The model that the adapters in a PEFT folder belong to.

    Raises:
        CheckpointError: it is not here.
    """
    named = where or read_peft_config(path / ADAPTER_CONFIG).base
    if not isinstance(named, str) or (where is None and not Path(named).is_dir()):
        raise CheckpointError(
            f"{path / ADAPTER_CONFIG}: base_model_name_or_path={named!r} is no folder here. Set "
            "it, or --base, to "
            f"the folder of the model that the adapters were trained with."
        )
    return open_pretrained(locate(named))


def find_family_of(source: Pretrained) -> Family:
    """Return the architecture that a model has, or will have, in a Hugging Face folder.

    That is the one it was converted from; a model trained from a recipe gets the first that has
    words for it.

    Raises:
        ConfigError: no family has words for the model, or the one that it was converted from has
        none.
    """
    if isinstance(source.weights, HuggingFaceFolder):
        return source.weights.family
    if source.hf_source is None:
        return family_for(source.model)
    family = source.hf_source.family
    try:
        family.write_config(source.model)
    except ConfigError as error:
        try:
            other = family_for(source.model)
        except ConfigError:
            raise error from None
        raise ConfigError(
            f"{source.path} cannot be written as {family.architecture}: {error} Or set "
            f"--family={other.model_type} to "
            f"write it as {other.architecture}."
        ) from error
    return family


def _located(source: str) -> Path | None:
    """As `locate`, for folders that may be gone."""
    try:
        return locate(source)
    except CheckpointError:
        return None


def _raw_settings(path: Path) -> Mapping[str, Any]:  # JSON
    """config.yaml of a checkpoint; empty where there is none."""
    file = path / "config.yaml"
    try:
        raw = parse_stored_settings(storage.read_bytes(file)) if file.is_file() else None
    except yaml.YAMLError:  # whoever needs what it says about the model has refused it
        raw = None
    return raw if isinstance(raw, dict) else {}


def _within_settings(settings: Any, *names: str) -> Any:  # JSON
    """A setting by its path; None where it is not said."""
    for name in names:
        settings = settings.get(name) if isinstance(settings, dict) else None
    return settings


def _settings(checkpoint: Checkpoint) -> tuple[ModelConfig, TokenizerConfig]:
    """What the checkpoint's config.yaml says about model and tokenizer; the rest of it is not
    looked at."""
    try:
        raw = parse_stored_settings(checkpoint.config_text)
        return from_dict(ModelConfig, raw["model"]), from_dict(
            TokenizerConfig, raw.get("tokenizer", {})
        )
    except (yaml.YAMLError, ConfigError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint.path / 'config.yaml'} does not describe a model ({type(error).__name__}: "
            f"{error}). Use a checkpoint that `megalith train` or `megalith convert` wrote."
        ) from error
