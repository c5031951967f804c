"""Conversion between model folders: the plan of what happens to every tensor, its execution, and
auxiliary files (tokenizer, license)."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megalith import __version__, storage
from megalith.checkpoint.format import MANIFEST, lengths, sha256, show_box, show_dtype
from megalith.config.checkpoint import NewRowInit
from megalith.config.data import VOCABULARY
from megalith.config.tree import dump_yaml, to_dict
from megalith.data.chat_template import CONFIG_FILE, TEMPLATE_FILE, ChatTemplate, find_template
from megalith.data.huggingface import HuggingFaceTokenizer
from megalith.data.tokenizer import Tokenizer, build_tokenizer, moved_to
from megalith.errors import DataError
from megalith.hf.box_files import BoxesToWrite
from megalith.hf.folder import (
    AUXILIARY_FILES,
    CONFIG,
    GENERATION,
    TOKENIZER_FILES,
    HFSource,
    HuggingFaceFolder,
    Weights,
    write_folder,
)
from megalith.hf.megatron_checkpoint import MegatronCheckpoint, is_megatron
from megalith.hf.peft import ADAPTER_CONFIG, AdaptedWeights, fingerprint
from megalith.hf.pretrained import FORCE_LOAD_BALANCING, HF_SOURCE, Pretrained, find_export_family
from megalith.hf.release import (
    parameters,
    plan_optimizer_state,
    release_run,
    write_release,
)
from megalith.hf.staging import CONVERSION, ConversionOptions, Recipe
from megalith.hf.tensor_rules import TensorRule, dtype_to_write
from megalith.plan.shards import Shard

# --- auxiliary files of a model: tokenizer, generation settings, licenses and the chat template it
# was tuned with
#
# A run on conversations adds two settings that no file of its base model has: the chat template,
# and the tokens that end a turn.


def copy_auxiliary_files(
    source: Pretrained, token_ids: dict[str, Any], *, to_huggingface: bool
) -> dict[str, bytes]:  # Any: JSON
    """Return the contents of the auxiliary files of a model, by file name.

    A Hugging Face folder (`to_huggingface`) without a tokenizer gets no chat template, which it
    could not use.

    Raises:
        DataError: the tokenizer or the template that the model was trained with no longer exists.
    """
    files = {name: _read_checked(file) for name, file in source.auxiliary_files().items()}
    has_own_vocabulary_file = (
        not to_huggingface
        and source.checkpoint is not None
        and source.tokenizer.path == str(source.path / VOCABULARY)
    )
    if not has_own_vocabulary_file and (converted := _convert_gpt2_tokenizer(source, files)):
        # otherwise its config.yaml names the two files, which are copied
        files = converted | {
            name: contents for name, contents in files.items() if name in AUXILIARY_FILES
        }
    if source.tokenizer.kind == "null" or not source.tuning():
        return files
    tokenizer = build_tokenizer(source.tokenizer)
    template = find_own_template(source, tokenizer)
    if template is not None and not (to_huggingface and files.keys().isdisjoint(TOKENIZER_FILES)):
        files[TEMPLATE_FILE] = template.source.encode()
        if to_huggingface:
            files[CONFIG_FILE] = _add_template(files, template)
    stop_ids = find_turn_end(template or _tokenizer_template(source, tokenizer), tokenizer)[0]
    generation = (
        storage.parse_json(files[GENERATION])
        if GENERATION in files
        else _default_generation_config(token_ids)
    )
    files[GENERATION] = _encode_json(
        generation | {"eos_token_id": _add_stop_ids(generation.get("eos_token_id"), stop_ids)}
    )
    return files


def _read_checked(file: Path) -> bytes:
    """Read an auxiliary file, and check that it is valid JSON if its name says so.

    Raises:
        DataError: it is not.
    """
    contents = storage.read_bytes(file)
    if file.suffix == ".json":
        try:
            document = storage.parse_json(contents)
        except ValueError as error:
            raise DataError(
                f"{file}: not JSON ({error}). Copy the file again, or remove it."
            ) from error
        if not isinstance(document, dict) or (
            file.name == "tokenizer.json" and not isinstance(document.get("model"), dict)
        ):
            expected = "an object" if not isinstance(document, dict) else 'a "model" in it'
            raise DataError(
                f"{file}: expected {expected}, got {str(document)!r:.40}. Copy it again, or "
                "remove it."
            )
    return contents


def _convert_gpt2_tokenizer(source: Pretrained, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return tokenizer.json made from vocab.json and merges.txt, which only some libraries read."""
    if source.tokenizer.kind != "huggingface" or "tokenizer.json" in files:
        return {}
    tokenizer = build_tokenizer(source.tokenizer)
    return (
        tokenizer.to_files()
        if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.is_gpt2_format
        else {}
    )


def find_own_template(source: Pretrained, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the chat template saved with the weights, or the one named by their run; None: use the
    tokenizer's.

    Raises:
        DataError: the template file no longer exists.
    """
    template_file = source.path / TEMPLATE_FILE
    name = str(template_file) if template_file.is_file() else source.tuning().get("template")
    if not isinstance(name, str):
        return None
    try:
        return find_template(name, tokenizer, source.tokenizer.path, setting="data.sft.template")
    except DataError as error:
        raise DataError(
            f"{error} For a finished run, put the template into {template_file}, which has "
            "priority."
        ) from error


def find_turn_end(
    template: ChatTemplate, tokenizer: Tokenizer
) -> tuple[frozenset[int], tuple[str, ...]]:
    """Return what ends a turn: token ids, or texts if the tokenizer has no token for them."""
    end = template.turn_end()
    token_id = tokenizer.specials.get(end)
    return (frozenset(), (end,)) if token_id is None else (frozenset({token_id}), ())


def _tokenizer_template(source: Pretrained, tokenizer: Tokenizer) -> ChatTemplate:
    return find_template(None, tokenizer, source.tokenizer.path, setting="data.sft.template")


def _add_template(files: dict[str, bytes], template: ChatTemplate) -> bytes:
    """Return tokenizer_config.json with the chat template, which transformers before 4.43 reads
    from there, and the special tokens that the template uses."""
    try:
        settings = storage.parse_json(
            files.get(CONFIG_FILE, b'{"tokenizer_class": "PreTrainedTokenizerFast"}')
        )
    except ValueError as error:
        raise DataError(
            f"{CONFIG_FILE}: not JSON ({error}). Use the file that came with the tokenizer."
        ) from error
    used_specials = {
        name: text for name, text in template.specials.items() if name in template.source
    }
    return _encode_json(used_specials | settings | {"chat_template": template.source})


def _default_generation_config(token_ids: dict[str, Any]) -> dict[str, Any]:
    """Return generation_config.json of a model that has none."""
    return {
        "_from_model_config": True,
        **{name: value for name, value in token_ids.items() if value is not None},
    }


def _add_stop_ids(
    eos_token_id: Any, stop_ids: frozenset[int]
) -> Any:  # JSON: a token id, a list, or null
    """Return eos_token_id with the tokens that end a turn added."""
    existing_ids = (
        eos_token_id
        if isinstance(eos_token_id, list)
        else []
        if eos_token_id is None
        else [eos_token_id]
    )
    all_ids = [*existing_ids, *sorted(stop_ids - set(existing_ids))]
    return eos_token_id if all_ids == existing_ids else all_ids[0] if len(all_ids) == 1 else all_ids


def _encode_json(contents: Any) -> bytes:  # JSON
    return (json.dumps(contents, indent=2, ensure_ascii=False) + "\n").encode()


Kind = Literal["megalith", "huggingface", "megatron"]


@dataclass(frozen=True, slots=True)
class Move:
    """How one tensor is converted."""

    source: str
    """What is read: a tensor, the box of it unless it is the whole, and the adapters added to
    it."""

    target: str
    shape: tuple[int, ...]
    """Shape of the Hugging Face tensor, or of the parameter if there is none."""

    source_dtype: str
    """`bfloat16`, or `fp8 dequantized`."""

    target_dtype: str
    nbytes: int
    """Bytes in the target; 0: not written."""


def source_format(source: Pretrained) -> Kind:
    """Return the format of a source."""
    return "huggingface" if isinstance(source.weights, HuggingFaceFolder) else "megalith"


def plan_moves(source: Pretrained, to: Kind, dtype: torch.dtype | None) -> list[Move]:
    """Return how every tensor is converted, in the order of the forward pass, without reading
    values.

    Raises:
        ConfigError: the format cannot express the model.
    """
    weights = source.weights
    if to == "megalith" and not isinstance(weights, HuggingFaceFolder):
        state = find_training_state(source)
        optimizer = [] if state is None else plan_optimizer_state(state)
        moves = [_parameter_move(shard, source, dtype) for shard in parameters(source.model)]
        return moves + [_optimizer_move(item) for item in optimizer]
    family = find_export_family(source)
    unread = (
        [_skipped_move(name, weights) for name in weights.others]
        if isinstance(weights, HuggingFaceFolder)
        else []
    )
    # The tensors of the folder itself, without added rows.
    stored = (
        weights.model_config
        if to == "megalith" and isinstance(weights, HuggingFaceFolder)
        else source.model
    )
    moves = [_tensor_move(rule, source, to, dtype) for rule in family.rules(stored)]
    if to == "huggingface":
        family.write_config(source.model)  # checks that the family can express the model
        return (
            moves
            + [_tensor_move(rule, source, to, dtype) for rule in family.copies(source.model)]
            + unread
        )
    assert isinstance(weights, HuggingFaceFolder)
    return moves + [_duplicate_move(rule, weights) for rule in weights.copies] + unread


def _skipped_move(name: str, folder: HuggingFaceFolder) -> Move:
    info, stored = folder.others[name], folder.stored_as(name)
    return Move(name, "nothing: not part of the text model", info.shape, stored, stored, 0)


def _duplicate_move(copy: TensorRule, folder: HuggingFaceFolder) -> Move:
    stored = folder.stored_as(copy.name)
    return Move(copy.name, f"nothing: it repeats {copy.parameter}", copy.shape, stored, stored, 0)


def _parameter_move(shard: Shard, source: Pretrained, dtype: torch.dtype | None) -> Move:
    stored = source.weights.dtype(shard.name)
    target_dtype = dtype_to_write(shard.name, stored, dtype)
    source_name = shard.name + describe_added_adapters(shard.name, source.weights)
    return Move(
        source_name,
        shard.name,
        shard.shape,
        show_dtype(stored),
        show_dtype(target_dtype),
        shard.numel * target_dtype.itemsize,
    )


def find_training_state(source: Pretrained) -> MegatronCheckpoint | None:
    """Return the checkpoint whose step and optimizer state are converted with the weights: one of
    Megatron that was opened with them, or None."""
    checkpoint = source.checkpoint
    if isinstance(checkpoint, MegatronCheckpoint) and checkpoint.has_training_state:
        return checkpoint
    return None


def _optimizer_move(item: BoxesToWrite) -> Move:
    dtype = show_dtype(item.dtype)
    return Move(item.key, item.key, item.shape, dtype, dtype, item.nbytes)


def _tensor_move(rule: TensorRule, source: Pretrained, to: Kind, dtype: torch.dtype | None) -> Move:
    parameter = rule.parameter or "embed.weight"
    target_dtype = source.weights.dtype(parameter)
    stored = show_dtype(target_dtype)
    target_dtype = dtype_to_write(parameter, target_dtype, dtype)
    if isinstance(source.weights, HuggingFaceFolder):
        stored = source.weights.stored_as(rule.name)
    parameter_part = "zeros" if rule.parameter is None else f"{rule.parameter}{show_box(rule.box)}"
    tensor_part = (
        rule.name if rule.covers_tensor else f"{rule.name}{show_box(rule.at)} of {list(rule.view)}"
    )
    read_part = parameter_part + describe_added_adapters(parameter, source.weights)
    source_part, target_part = (
        (tensor_part, parameter_part)
        if source_format(source) == "huggingface"
        else (read_part, tensor_part)
    )
    if source_format(source) == to:
        target_part = source_part
    shape = rule.shape if rule.covers_tensor else lengths(rule.at)
    return Move(
        source_part,
        target_part,
        shape,
        stored,
        show_dtype(target_dtype),
        math.prod(shape) * target_dtype.itemsize,
    )


def describe_added_adapters(parameter: str, weights: Weights) -> str:
    """Return a description of the adapters added to a parameter; empty without adapters."""
    if (
        not isinstance(weights, AdaptedWeights)
        or f"{parameter}.lora_a" not in weights.adapters.names
    ):
        return ""
    return f" + {weights.adapters.lora.scale:g} · lora_b · lora_a"


def list_written_tensors(moves: Iterable[Move]) -> set[str]:
    """Return the tensors that are written: several moves may fill one tensor, and others none."""
    return {move.target.partition("[")[0] for move in moves if move.nbytes} - {"zeros"}


def describe_merged_adapters(weights: Weights, moves: Sequence[Move]) -> str | None:
    """Describe which adapters are merged into which model; None without adapters."""
    if not isinstance(weights, AdaptedWeights):
        return None
    count = len(list_written_tensors(move for move in moves if " · lora_b · lora_a" in move.source))
    rank = weights.adapters.lora.rank
    return (
        f"{count} of them with adapters of rank {rank} from {weights.path} added to "
        f"{weights.base_path}"
    )


def convert(
    source: Pretrained,
    target: Path,
    to: Kind,
    options: ConversionOptions = CONVERSION,
    *,
    shard_nbytes: int = 5 * 10**9,
) -> int:
    """Write `target` and return its bytes of weights.

    Each worker reads through memory maps and holds only what it casts or transposes: a piece or one
    tensor. `shard_nbytes`: size of the files of a Hugging Face folder.

    Raises:
        CheckpointError: the target exists, an interrupted conversion had another source or other
            settings, a source file is damaged, or writing failed.
        ConfigError: the format cannot express the model.
        DataError: its tokenizer no longer exists.
    """
    ids = token_ids(source)
    auxiliary_files = copy_auxiliary_files(source, dict(ids), to_huggingface=to == "huggingface")
    if to == "huggingface":
        names = {} if source.hf_source is None else source.hf_source.activation_names
        return write_folder(
            target,
            source.model,
            source.weights,
            options,
            hf_source=HFSource(find_export_family(source), names),
            shard_nbytes=shard_nbytes,
            extra=ids,
            auxiliary_files=auxiliary_files,
        )
    training_state = find_training_state(source)
    state = build_release_state(source)
    state |= {} if training_state is None else training_state.state
    return write_release(
        target,
        source.model,
        source.weights,
        options,
        config_text=format_release_config(source, target),
        state=state,
        auxiliary_files=auxiliary_files,
        training_state=training_state,
    )


def build_recipe(
    source: Pretrained,
    to: Kind,
    *,
    dtype: torch.dtype | None,
    shard_nbytes: int,
    new_rows: NewRowInit,
) -> Recipe:
    """Return what determines the bytes of a conversion; conversions with equal recipes may reuse
    each other's files.

    Values are identified by the files (names, sizes, times; the manifest of a checkpoint, which has
    all hashes) and by some values of each parameter, which do not depend on `new_rows`.
    """
    shape = sha256(repr(sorted(to_dict(source.model).items())).encode())[:16]
    return {
        "source": source.location,
        "its files": _hash_file_identities(source),
        "its values": fingerprint(source.weights, source.model),
        "its model": shape,
        "to": to,
        "dtype": "as they are" if dtype is None else show_dtype(dtype),
        "new rows": new_rows,
        "architecture": find_export_family(source).architecture if to == "huggingface" else "none",
        "largest file": f"{shard_nbytes:,} bytes" if to == "huggingface" else "fixed",
        "training state": "none" if find_training_state(source) is None else "all",
        "software": f"megalith {__version__}, torch {torch.__version__}",
    }


def _hash_file_identities(source: Pretrained) -> str:
    """Return a hash that identifies the files of a source without reading them."""
    folders = dict.fromkeys(
        (
            source.path,
            *source.source_folders()[: 1 if isinstance(source.weights, AdaptedWeights) else 0],
        )
    )
    identities = []
    for folder in folders:
        if (folder / MANIFEST).exists():
            location = source.location if folder == source.path else folder.absolute()
            identities.append(f"{location} {sha256(storage.read_bytes(folder / MANIFEST))}")
            continue
        megatron = is_megatron(folder)
        for file in sorted(folder.rglob("*") if megatron else folder.iterdir()):
            if megatron or file.suffix == ".safetensors" or file.name in (CONFIG, ADAPTER_CONFIG):
                stat = file.stat()
                identities.append(f"{file.absolute()} {stat.st_size} {stat.st_mtime_ns}")
    return sha256("\n".join(identities).encode())[:16]


def token_ids(source: Pretrained) -> Mapping[str, Any]:  # JSON
    """Return bos_token_id, eos_token_id and pad_token_id of the model, or else of its tokenizer."""
    if source.token_ids or source.tokenizer.kind == "null":
        return source.token_ids
    tokenizer = build_tokenizer(source.tokenizer)
    return {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod, "pad_token_id": None}


def build_release_state(source: Pretrained) -> dict[str, Any]:  # JSON
    """Return the state of a checkpoint of weights: records of the model, no training state."""
    state: dict[str, Any] = {"token_ids": token_ids(source)}  # Any: JSON
    if source.force_load_balancing:
        state[FORCE_LOAD_BALANCING] = list(source.force_load_balancing)
    return state | ({} if source.hf_source is None else {HF_SOURCE: source.hf_source.as_json()})


def format_release_config(source: Pretrained, target: Path) -> str:
    """Return config.yaml of a checkpoint of weights at `target`."""
    if isinstance(source.checkpoint, MegatronCheckpoint):
        tokenizer = moved_to(source.tokenizer, target.absolute())
        return source.checkpoint.format_settings(tokenizer, load=target.absolute())
    if source.checkpoint is not None:
        return source.checkpoint.config_text
    tokenizer = moved_to(source.tokenizer, target.absolute())
    return dump_yaml(release_run(target.name, source.model, tokenizer, target))
