"""From one kind of model folder to another: what becomes of every tensor, and doing it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megalith import __version__, storage
from megalith.checkpoint.boxes import lengths, show_box
from megalith.checkpoint.format import MANIFEST, sha256, show_dtype
from megalith.config.checkpoint import NewRows
from megalith.config.tree import dump_yaml, to_dict
from megalith.data.tokenizer import build_tokenizer, moved_to
from megalith.models.adapters import ADAPTER_CONFIG, AdaptedWeights, fingerprint
from megalith.models.companions import copy_auxiliary_files
from megalith.models.hf import CONFIG, HuggingFaceFolder, Weights, write_folder
from megalith.models.journal import Attempt, Recipe
from megalith.models.names import TensorRule, dtype_to_write
from megalith.models.pretrained import FORCE_LOAD_BALANCING, HF_SOURCE, Pretrained, find_family_of
from megalith.models.release import parameters, release_run, write_release
from megalith.plan.shards import Shard

Kind = Literal["megalith", "huggingface"]


@dataclass(frozen=True, slots=True)
class Move:
    """What becomes of one tensor."""

    source: str
    """Where it is read from: a name, and the box of it where it is not whole; and adapters that are
    added to it."""

    target: str
    shape: tuple[int, ...]
    """As a tensor of the Hugging Face folder has it; of the parameter, where there is none."""

    source_dtype: str
    """`bfloat16`, or `fp8 dequantized`."""

    target_dtype: str
    nbytes: int
    """In the target; 0: it is left out."""


def kind_of(source: Pretrained) -> Kind:
    """What a source is."""
    return "huggingface" if isinstance(source.weights, HuggingFaceFolder) else "megalith"


def plan_moves(source: Pretrained, to: Kind, dtype: torch.dtype | None) -> list[Move]:
    """Every tensor in the order of the forward pass, and what becomes of it; reads no values.

    Raises:
        ConfigError: the model has no form of that kind.
    """
    weights = source.weights
    if to == "megalith" and not isinstance(weights, HuggingFaceFolder):
        return [_parameter_move(shard, source, dtype) for shard in parameters(source.model)]
    family = find_family_of(source)
    unread = (
        [_unread(name, weights) for name in weights.others]
        if isinstance(weights, HuggingFaceFolder)
        else []
    )
    # Of a folder's own tensors, whatever rows are added to them.
    stored = (
        weights.model_config
        if to == "megalith" and isinstance(weights, HuggingFaceFolder)
        else source.model
    )
    moves = [_tensor_move(rule, source, to, dtype) for rule in family.rules(stored)]
    if to == "huggingface":
        family.write_config(source.model)  # raises, if anything does
        return (
            moves
            + [_tensor_move(rule, source, to, dtype) for rule in family.copies(source.model)]
            + unread
        )
    assert isinstance(weights, HuggingFaceFolder)
    return moves + [_dropped(rule, weights) for rule in weights.copies] + unread


def _unread(name: str, folder: HuggingFaceFolder) -> Move:
    info, stored = folder.others[name], folder.stored_as(name)
    return Move(name, "nothing: it is no part of the model of text", info.shape, stored, stored, 0)


def _dropped(copy: TensorRule, folder: HuggingFaceFolder) -> Move:
    stored = folder.stored_as(copy.name)
    return Move(copy.name, f"nothing: it repeats {copy.parameter}", copy.shape, stored, stored, 0)


def _parameter_move(shard: Shard, source: Pretrained, dtype: torch.dtype | None) -> Move:
    stored = source.weights.dtype(shard.name)
    kept = dtype_to_write(shard.name, stored, dtype)
    read = shard.name + added(shard.name, source.weights)
    return Move(
        read,
        shard.name,
        shard.shape,
        show_dtype(stored),
        show_dtype(kept),
        shard.numel * kept.itemsize,
    )


def _tensor_move(rule: TensorRule, source: Pretrained, to: Kind, dtype: torch.dtype | None) -> Move:
    parameter = rule.parameter or "embed.weight"
    kept = source.weights.dtype(parameter)
    stored = show_dtype(kept)
    kept = dtype_to_write(parameter, kept, dtype)
    if isinstance(source.weights, HuggingFaceFolder):
        stored = source.weights.stored_as(rule.name)
    ours = "zeros" if rule.parameter is None else f"{rule.parameter}{show_box(rule.box)}"
    theirs = rule.name if rule.whole else f"{rule.name}{show_box(rule.at)} of {list(rule.view)}"
    read = ours + added(parameter, source.weights)
    here, there = (theirs, ours) if kind_of(source) == "huggingface" else (read, theirs)
    if kind_of(source) == to:
        there = here
    shape = rule.shape if rule.whole else lengths(rule.at)
    return Move(here, there, shape, stored, show_dtype(kept), math.prod(shape) * kept.itemsize)


def added(parameter: str, weights: Weights) -> str:
    """What adapters add to a parameter: nothing, or their product."""
    if (
        not isinstance(weights, AdaptedWeights)
        or f"{parameter}.lora_a" not in weights.adapters.names
    ):
        return ""
    return f" + {weights.adapters.lora.scale:g} · lora_b · lora_a"


def written_names(moves: Iterable[Move]) -> set[str]:
    """The tensors that are written: several moves may fill one, and others none."""
    return {move.target.partition("[")[0] for move in moves if move.nbytes} - {"zeros"}


def merged_into(weights: Weights, moves: Sequence[Move]) -> str | None:
    """In words, which adapters go into which model; None: none do."""
    if not isinstance(weights, AdaptedWeights):
        return None
    count = len(written_names(move for move in moves if " · lora_b · lora_a" in move.source))
    rank = weights.adapters.lora.rank
    return (
        f"{count} of them with adapters of rank {rank} from {weights.path} added to "
        f"{weights.base_path}"
    )


def convert(
    source: Pretrained,
    target: Path,
    to: Kind,
    *,
    dtype: torch.dtype | None = None,
    shard_nbytes: int = 5 * 10**9,
    wrote: Callable[[int], None] = lambda nbytes: None,
    workers: int = 2,
    attempt: Attempt | None = None,
) -> int:
    """Write `target`; returns its bytes of weights. `wrote` is told those of each tensor, by any of
    the workers.

    `workers` threads write at the same time; each has views of its source's files, and of what is
    cast or turned a piece, or one tensor, in memory. With an `attempt`, what an earlier one that
    was killed has written whole is kept.

    Raises:
        CheckpointError: the target exists, an earlier attempt was of another source or other
            settings, a source file is damaged, or the disk refused something.
        ConfigError: the model has no form of that kind.
        DataError: its tokenizer is gone.
    """
    ids = token_ids(source)
    auxiliary_files = copy_auxiliary_files(source, dict(ids), theirs=to == "huggingface")
    if to == "huggingface":
        return write_folder(
            target,
            source.model,
            source.weights,
            dtype=dtype,
            shard_nbytes=shard_nbytes,
            family=find_family_of(source),
            activation_names=None
            if source.hf_source is None
            else source.hf_source.activation_names,
            extra=ids,
            auxiliary_files=auxiliary_files,
            wrote=wrote,
            workers=workers,
            attempt=attempt,
        )
    state: dict[str, Any] = {"token_ids": ids}  # Any: JSON
    state |= (
        {FORCE_LOAD_BALANCING: list(source.force_load_balancing)}
        if source.force_load_balancing
        else {}
    )
    state |= {} if source.hf_source is None else {HF_SOURCE: source.hf_source.as_json()}
    return write_release(
        target,
        source.model,
        source.weights,
        config_text=_release_config(source, target),
        dtype=dtype,
        state=state,
        auxiliary_files=auxiliary_files,
        wrote=wrote,
        workers=workers,
        attempt=attempt,
    )


def recipe_of(
    source: Pretrained, to: Kind, *, dtype: torch.dtype | None, shard_nbytes: int, new_rows: NewRows
) -> Recipe:
    """What decides the bytes of a conversion: two that have the same may go on with one another's
    files.

    Values are told by their files (names, lengths, times; of a checkpoint the manifest, which has
    all hashes) and by some of each parameter, which tell nothing of `new_rows`.
    """
    shape = sha256(repr(sorted(to_dict(source.model).items())).encode())[:16]
    return {
        "source": str(source.path.absolute()),
        "its files": _files_of(source),
        "its values": fingerprint(source.weights, source.model),
        "its model": shape,
        "to": to,
        "dtype": "as they are" if dtype is None else show_dtype(dtype),
        "new rows": new_rows,
        "architecture": find_family_of(source).architecture if to == "huggingface" else "none",
        "largest file": f"{shard_nbytes:,} bytes" if to == "huggingface" else "fixed",
        "software": f"megalith {__version__}, torch {torch.__version__}",
    }


def _files_of(source: Pretrained) -> str:
    """A hash of what is known of a source's files without reading them."""
    folders = dict.fromkeys(
        (
            source.path,
            *source.source_folders()[: 1 if isinstance(source.weights, AdaptedWeights) else 0],
        )
    )
    known = []
    for folder in folders:
        if (folder / MANIFEST).exists():
            known.append(f"{folder.absolute()} {sha256(storage.read_bytes(folder / MANIFEST))}")
            continue
        for file in sorted(folder.iterdir()):
            if file.suffix == ".safetensors" or file.name in (CONFIG, ADAPTER_CONFIG):
                found = file.stat()
                known.append(f"{file.absolute()} {found.st_size} {found.st_mtime_ns}")
    return sha256("\n".join(known).encode())[:16]


def token_ids(source: Pretrained) -> Mapping[str, Any]:  # JSON
    """bos_token_id, eos_token_id and pad_token_id: those that came with the model, else its
    tokenizer's."""
    if source.token_ids or source.tokenizer.kind == "null":
        return source.token_ids
    tokenizer = build_tokenizer(source.tokenizer)
    return {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod, "pad_token_id": None}


def _release_config(source: Pretrained, target: Path) -> str:
    if source.checkpoint is not None:
        return source.checkpoint.config_text
    tokenizer = moved_to(source.tokenizer, target.absolute())
    return dump_yaml(release_run(target.name, source.model, tokenizer, target))
