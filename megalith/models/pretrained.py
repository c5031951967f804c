"""Where weights come from: a checkpoint of ours, the newest one of a run, or a Hugging Face folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megalith import storage
from megalith.checkpoint.agree import together
from megalith.checkpoint.boxes import Entry
from megalith.checkpoint.format import MANIFEST, step_folders
from megalith.checkpoint.load import Checkpoint, find_latest, open_checkpoint
from megalith.config.model import ModelConfig
from megalith.config.suggest import did_you_mean
from megalith.config.tokenizer import TokenizerConfig
from megalith.config.tree import differences, from_dict
from megalith.data.huggingface import find_tokenizer_file
from megalith.errors import CheckpointError, ConfigError
from megalith.models.hf import (
    CONFIG,
    GENERATION,
    TOKEN_IDS,
    TOKENIZER_FILES,
    HuggingFaceFolder,
    Weights,
    companion_files,
    read_json,
)
from megalith.parallel.group import Group
from megalith.plan.shards import Box

RUNS = Path("runs")

FREE = ("max_seq_len", "norm_eps", "rope", "init_std")
"""Settings of a model that its weights do not show; they may change when weights are taken over, and are then named."""


@dataclass(frozen=True, slots=True)
class CheckpointWeights:
    """The weights in a checkpoint of ours, by name."""

    checkpoint: Checkpoint

    def dtype(self, parameter: str) -> torch.dtype:
        """As stored."""
        return self.checkpoint.dtype(f"model.{parameter}")

    def read(self, parameter: str, box: Box, dtype: torch.dtype) -> Tensor:
        """A box of a parameter; from its master copy where another dtype than the stored one is wanted."""
        master = f"optimizer.master.{parameter}"
        exact = dtype == self.dtype(parameter) or master not in self.checkpoint.manifest.tensors
        return self.checkpoint.read(f"model.{parameter}" if exact else master, box, dtype)


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model with weights, opened: everything about it that is not a tensor, and a way to read those."""

    path: Path
    """Of the checkpoint or folder itself."""

    model: ModelConfig
    tokenizer: TokenizerConfig
    """The one it was trained with; `null` where none came with it."""

    weights: Weights
    token_ids: Mapping[str, Any]  # JSON
    """bos_token_id, eos_token_id and pad_token_id, where known."""

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Set when it is one of ours."""
        return self.weights.checkpoint if isinstance(self.weights, CheckpointWeights) else None

    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a text, as the folder itself says: chat models have several."""
        found = [self.token_ids.get("eos_token_id")]
        if (self.path / GENERATION).is_file():
            found.append(read_json(self.path / GENERATION).get("eos_token_id"))
        ids = [item for value in found for item in (value if isinstance(value, list) else [value])]
        return frozenset(item for item in ids if type(item) is int)

    def companions(self) -> dict[str, Path]:
        """Files that go with the weights: tokenizer, generation_config.json, licence.

        Raises:
            DataError: the tokenizer that the model was trained with is gone.
        """
        files = companion_files(self.path)
        if "tokenizer.json" not in files and self.tokenizer.path is not None:
            folder = find_tokenizer_file(self.tokenizer.path).parent
            files = {name: file for name, file in companion_files(folder).items() if name in TOKENIZER_FILES} | files
        return files


def locate(source: str) -> Path:
    """The checkpoint or Hugging Face folder that a person means: itself, or the newest checkpoint of a run.

    Run by one rank.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(source)
    if not path.exists() and (RUNS / source).is_dir():
        path = RUNS / source
    if not path.is_dir():
        advice = did_you_mean(source, storage.list_names(RUNS)) or ""
        raise CheckpointError(
            f"{source}: no such folder, neither here nor under {RUNS}/.{advice} "
            f"Pass the folder of a run, checkpoint or model."
        )
    if (path / MANIFEST).exists() or (path / CONFIG).exists():
        return path
    for folder in (path / "checkpoints", path):
        if step_folders(folder) and (latest := find_latest(folder)) is not None:
            return latest
    shown = ", ".join(storage.list_names(path)[:6]) or "nothing"
    raise CheckpointError(
        f"{path} has no checkpoint (found: {shown}). Use the folder of a run that has saved one, a checkpoint, "
        f"or a Hugging Face folder with {CONFIG}."
    )


def open_pretrained(path: Path) -> Pretrained:
    """The model in a folder that `locate` gave.

    Raises:
        CheckpointError: it is damaged, incomplete, or of an architecture that is not supported.
    """
    if not (path / MANIFEST).exists() and (path / CONFIG).exists():
        return _open_folder(path)
    checkpoint = open_checkpoint(path)
    model, tokenizer = _settings(checkpoint)
    if tokenizer.kind == "huggingface" and (path / "tokenizer.json").is_file():
        tokenizer = replace(tokenizer, path=str(path))  # the checkpoint brings its own, wherever it was moved to
    ids = checkpoint.state.get("token_ids")
    return Pretrained(path, model, tokenizer, CheckpointWeights(checkpoint), ids if isinstance(ids, dict) else {})


def load_pretrained(entries: Sequence[Entry], source: str, world: Group, *, model: ModelConfig) -> list[str]:
    """Fill weights (roles `param` and `master`) from `source`; nothing else of it is taken over.

    Collective over `world`. Returns what differs between the two models without showing in the weights, one line each.

    Raises:
        CheckpointError: on every rank: there is nothing to load, or it is another model than `model`.
    """
    path = together(lambda: locate(source) if world.rank == 0 else None, world)[0]
    assert path is not None
    opened = open_pretrained(path)
    notes = compare_models(opened, model)
    if opened.checkpoint is None:
        folder = opened.weights
        assert isinstance(folder, HuggingFaceFolder)
        together(lambda: folder.fill(entries), world)
        return notes
    opened.checkpoint.load_into([entry for entry in entries if entry.role == "param"], world)
    masters = [entry for entry in entries if entry.role == "master"]
    opened.checkpoint.load_into(masters, world, strict=False)  # its moments are surplus, and stay where they are
    return notes


def compare_models(opened: Pretrained, model: ModelConfig) -> list[str]:
    """Differences that are allowed, one line each.

    Raises:
        CheckpointError: some are not; all of these are named.
    """
    theirs, ours = (replace(config, head_dim=config.head_size()) for config in (opened.model, model))
    if opened.checkpoint is None:  # padding is decided here, when a folder is read
        theirs = replace(theirs, vocab_multiple=ours.vocab_multiple)
    changed = [(path, f"model.{path}: {old} there, {new} here") for path, old, new in differences(theirs, ours)]
    refused = [line for path, line in changed if path.partition(".")[0] not in FREE]
    if refused:
        lines = "\n".join(f"  {line}" for line in refused)
        raise CheckpointError(f"{opened.path} is another model:\n{lines}\nTo load it, set model.* to what is there.")
    return [line for path, line in changed if path != "init_std"]


def _open_folder(path: Path) -> Pretrained:
    folder = HuggingFaceFolder(path)
    known = (path / "tokenizer.json").is_file()
    tokenizer = (
        TokenizerConfig(kind="huggingface", path=str(path))
        if known
        else TokenizerConfig(kind="null", vocab_size=folder.model_config.vocab_size)
    )
    ids = {name: folder.raw.get(name) for name in TOKEN_IDS}
    return Pretrained(path, folder.model_config, tokenizer, folder, ids)


def _settings(checkpoint: Checkpoint) -> tuple[ModelConfig, TokenizerConfig]:
    """What the checkpoint's config.yaml says about model and tokenizer; the rest of it is not looked at."""
    try:
        raw = yaml.safe_load(checkpoint.config_text)
        return from_dict(ModelConfig, raw["model"]), from_dict(TokenizerConfig, raw.get("tokenizer", {}))
    except (yaml.YAMLError, ConfigError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint.path / 'config.yaml'} does not describe a model ({type(error).__name__}: {error}). "
            f"Use a checkpoint that `megalith train` or `megalith convert` wrote."
        ) from error
