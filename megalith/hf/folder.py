"""Hugging Face folders: read config.json and safetensors box by box, and write them tensor by
tensor."""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megalith import storage
from megalith.checkpoint.format import (
    CheckpointEntry,
    TensorPiece,
    decode_for_loading,
    divide,
    inner_view,
    lengths,
    numel,
    pieces,
    show_bytes,
    show_dtype,
    to_row_major,
)
from megalith.checkpoint.keys import name_experts
from megalith.checkpoint.safetensors import (
    DTYPES,
    READABLE,
    PlannedTensor,
    TensorInfo,
    allocate_file,
    find_allocated_file,
    part_checksum,
    read_box,
    read_header,
    show_names,
    write_part,
)
from megalith.config.checkpoint import NewRowInit
from megalith.config.model import ModelConfig
from megalith.errors import CheckpointError, ConfigError, did_you_mean
from megalith.hf.config_fields import ACTIVATIONS, translate_field_names
from megalith.hf.families import FAMILIES
from megalith.hf.family import Family, UnexportedFieldsError, WrapperFamily
from megalith.hf.quantized import FIELD as QUANTISED
from megalith.hf.quantized import DequantizedTensor, dequantize
from megalith.hf.staging import (
    CONVERSION,
    ConversionJournal,
    ConversionOptions,
    open_staging,
    publish,
    run_in_order,
    split_by_nbytes,
)
from megalith.hf.tensor_rules import (
    BALANCING_BIAS,
    TensorRule,
    dtype_to_write,
    group_by_parameter,
    group_by_tensor,
    locate_box,
    strip_missing_prefix,
    to_parameter_layout,
    to_tensor_layout,
    unpadded_shape,
)
from megalith.plan.shards import Box, Shard, intersect
from megalith.rules.model import network_problems
from megalith.storage import StoragePath

PADDABLE_TABLES = "embed.weight", "head.weight"
"""Vocabulary tables, which may have more rows than their tensors; additional rows are zero or the
mean of the others."""

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
METADATA = {"format": "pt"}
"""Metadata that transformers requires in a safetensors file."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
LICENSES = "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "USE_POLICY.md"
"""Files that are copied with anything derived from the weights."""

AUXILIARY_FILES = *TOKENIZER_FILES, GENERATION, *LICENSES
"""Auxiliary files, copied with the unchanged weights."""

TOKEN_IDS = "bos_token_id", "eos_token_id", "pad_token_id"
"""Fields of config.json with token ids; unset they default to those of the first Llama."""

ACTIVATION_FIELDS = "hidden_act", "hidden_activation", "activation_function"
"""Fields of config.json that name the activation; some functions have several names."""

PIECE_NBYTES = 64 * 2**20
"""Bytes read at once (heuristic: large for a disk, small compared with a model)."""

BATCH_NBYTES = 128 * 2**20
"""Least number of bytes that a worker writes before it waits for the disk (heuristic)."""


@dataclass(frozen=True, slots=True)
class HFSource:
    """The Hugging Face model that a checkpoint was converted from, where ModelConfig does not
    determine it."""

    family: Family
    activation_names: Mapping[str, str] = field(default_factory=dict)
    """Original values of the fields of config.json that name the activation."""

    def as_json(self) -> dict[str, Any]:
        """Return the record for the state of a checkpoint."""
        return {
            "architecture": self.family.architecture,
            "activation_names": dict(self.activation_names),
        }


def parse_hf_source(record: Any, checkpoint_path: StoragePath) -> HFSource:  # Any: JSON
    """Return what `HFSource.as_json` wrote into a checkpoint.

    Raises:
        CheckpointError: the record is damaged, or names an architecture that is not supported.
    """
    fields = record if isinstance(record, dict) else {}
    by_architecture = {family.architecture: family for family in FAMILIES}
    architecture, names = fields.get("architecture"), fields.get("activation_names")
    is_known = isinstance(architecture, str) and architecture in by_architecture
    if (
        not is_known
        or not isinstance(names, dict)
        or not all(isinstance(name, str) for name in names.values())
    ):
        raise CheckpointError(
            f"{checkpoint_path}: the state records the Hugging Face model {record!r:.120}, "
            "expected an architecture "
            f"out of {', '.join(by_architecture)} and activation_names. Convert the model's folder "
            "again."
        )
    return HFSource(by_architecture[str(architecture)], names)


def find_family_by_name(name: str, *, setting: str) -> Family:
    """Return the family with this model_type or architecture, such as `qwen2` or
    `Qwen2ForCausalLM`.

    Raises:
        ConfigError: there is none; `setting` is the setting that names it.
    """
    for family in FAMILIES:
        if name in (family.model_type, family.architecture):
            return family
    model_types = [family.model_type for family in FAMILIES]
    raise ConfigError(
        f"{setting}={name}: unknown family.{did_you_mean(name, model_types)} Use one of "
        f"{', '.join(model_types)}."
    )


class Weights(Protocol):
    """Source of weights, read by parameter name."""

    def dtype(self, parameter: str) -> torch.dtype:
        """Return the dtype in which a parameter is stored."""

    def read(self, parameter: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Return a box of a parameter on the host, possibly a view of a mapped file: read-only and
        short-lived.

        Callers may omit rows that only pad a vocabulary.
        """


class HuggingFaceFolder:
    """A folder with config.json and safetensors: validated when it is opened, values are read on
    demand."""

    def __init__(self, path: Path) -> None:
        """Read and validate the config and the safetensors headers.

        Raises:
            CheckpointError: the folder is invalid or its architecture not supported, links lead out
                of it, or tensors are missing, unexpected, truncated or have a wrong shape; each is
                named.
        """
        check_links(path, storage.list_names(path))
        self.path = path
        self.new_rows: NewRowInit = "zero"
        self._means: dict[str, Tensor] = {}
        raw = read_json(path / CONFIG)
        self.family, outer = find_family(raw, path)
        self.raw = raw if outer is None else _inner_config(raw, outer, path)
        try:
            config = self.family.read_config(
                {name: self.raw[name] for name in self.raw if name != QUANTISED}
            )
        except ConfigError as error:
            raise CheckpointError(f"{path / CONFIG}: {error}") from error
        tensors = dequantize(self.raw, _read_headers(path), path)
        self.others = (
            {}
            if outer is None
            else {name: tensors[name] for name in tensors if outer.others.fullmatch(name)}
        )
        """Tensors outside of the text model, which are not read."""
        prefix = "" if outer is None else outer.prefix
        self._tensors = {
            name.removeprefix(prefix): tensors[name] for name in tensors if name not in self.others
        }
        self.model_config: ModelConfig = self.family.adjust_config(config, self._tensors.keys())
        if problems := network_problems(self.model_config, trains=False):
            messages = " ".join(translate_field_names(text, self.raw) for text in problems)
            raise CheckpointError(f"{path / CONFIG} describes an invalid model: {messages}")
        self.source = HFSource(self.family, _activation_names(self.raw, self.model_config))
        names = self._tensors.keys()
        self.rules = strip_missing_prefix(
            self.family.select_rules(self.model_config, names), self.family.prefix, names
        )
        self._rules = group_by_parameter(self.rules)
        self.copies = [
            rule for rule in self.family.copies(self.model_config) if rule.name in self._tensors
        ]
        """Rules of stored tensors that repeat others."""
        self._check_names()
        self._check_shapes()
        self._check_tied()
        self._check_copies()

    def dtype(self, parameter: str) -> torch.dtype:
        """Return the stored dtype; the widest one if several tensors make up the parameter."""
        dtypes = [DTYPES[self._tensors[rule.name].dtype] for rule in self._rules[parameter]]
        return reduce(torch.promote_types, dtypes)

    def stored_as(self, name: str) -> str:
        """Return how a tensor is stored: its dtype, or its quantization; any header dtype for
        tensors that are not read."""
        stored = self.others.get(name) or self._tensors[self._stored_name(name)]
        if isinstance(stored, DequantizedTensor):
            return f"{stored.kind} dequantized"
        return show_dtype(READABLE[stored.dtype]) if stored.dtype in READABLE else stored.dtype

    def _stored_name(self, name: str) -> str:
        return name if name in self._tensors else name.removeprefix(self.family.prefix)

    def read(self, parameter: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Return a box of a parameter on the host; a view of the file if it is inside one
        tensor."""
        parts = [rule for rule in self._rules[parameter] if intersect(rule.box, box)]
        if len(parts) == 1 and intersect(parts[0].box, box) == box:
            return self._stored_box(parts[0], box).to(dtype)
        values = torch.empty(lengths(box), dtype=dtype)
        self._fill_piece(parameter, TensorPiece(box, values))
        return values

    def fill(self, entries: Sequence[CheckpointEntry]) -> None:
        """Load the boxes of `entries`, a piece at a time; rows that the folder does not have are
        set by `new_rows`.

        Raises:
            CheckpointError: the folder lacks a parameter, or has it in another shape.
        """
        self._check_requested_shards([entry.shard for entry in entries])
        for entry in entries:
            wide = max(entry.tensor.element_size(), self.dtype(entry.shard.name).itemsize)
            with decode_for_loading([entry]) as decoded:
                for piece in pieces(decoded[0], max_numel=PIECE_NBYTES // wide):
                    self._fill_piece(entry.shard.name, piece)

    def _fill_piece(self, parameter: str, piece: TensorPiece) -> None:
        num_unfilled = numel(piece.box)
        parts = [
            (rule, overlap)
            for rule in self._rules[parameter]
            if (overlap := intersect(rule.box, piece.box))
        ]
        num_unfilled -= sum(numel(part) for _, part in parts)
        if num_unfilled:
            piece.values.zero_()
            if self.new_rows == "mean" and parameter in PADDABLE_TABLES:
                self._fill_new_rows(parameter, piece)
        for rule, part in parts:
            inner_view(piece, part).copy_(self._stored_box(rule, part))

    def count_new_rows(self, shards: Sequence[Shard]) -> int:
        """Return how many rows the vocabulary tables of `shards` have beyond those of the
        folder."""
        tables = [
            shard for shard in shards if shard.name in PADDABLE_TABLES and shard.name in self._rules
        ]
        return sum(
            max(0, shard.shape[0] - unpadded_shape(self._rules[shard.name])[0]) for shard in tables
        )

    def _fill_new_rows(self, parameter: str, piece: TensorPiece) -> None:
        """Set the rows beyond those of the folder to the mean of its rows."""
        rows = unpadded_shape(self._rules[parameter])[0]
        (start, stop), *columns = piece.box
        if parameter not in self._means:  # two threads may both compute it, with the same result
            self._means[parameter] = self._mean_row(parameter)
        mean = self._means[parameter][tuple(slice(*column) for column in columns)]
        inner_view(piece, ((max(rows, start), stop), *columns)).copy_(mean)

    def _mean_row(self, parameter: str) -> Tensor:
        """Return the mean row of a table, accumulated in float64 a piece at a time."""
        rows, *features = unpadded_shape(self._rules[parameter])
        total, step = (
            torch.zeros(features, dtype=torch.float64),
            max(1, PIECE_NBYTES // (8 * math.prod(features))),
        )
        for start in range(0, rows, step):
            box = (start, min(start + step, rows)), *((0, size) for size in features)
            total += self.read(parameter, box, torch.float64).sum(0)
        return total / rows

    def _stored_box(self, rule: TensorRule, part: Box) -> Tensor:
        """Return the values of a part of a rule's box, with the dims of the parameter."""
        region = locate_box(rule, part)
        stored = self._read(rule.name, region.slices)
        return to_parameter_layout(rule, stored.reshape(region.view)[region.at])

    def _read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Return a slice of a Hugging Face tensor."""
        info = self._tensors[name]
        return (
            info.read(part) if isinstance(info, DequantizedTensor) else read_box(name, info, part)
        )

    def _check_requested_shards(self, shards: Sequence[Shard]) -> None:
        problems = []
        for shard in shards:
            if shard.name not in self._rules:
                problems.append(f"{shard.name} is in this run but not in the folder")
                continue
            folder_shape = unpadded_shape(self._rules[shard.name])
            is_padded = shard.name in PADDABLE_TABLES and shard.shape[0] >= folder_shape[0]
            if shard.shape != ((shard.shape[0], *folder_shape[1:]) if is_padded else folder_shape):
                problems.append(
                    f"{shard.name} is {list(shard.shape)} in this run and {list(folder_shape)} "
                    "in the "
                    "folder"
                )
        if problems:
            lines = "\n".join(f"  {text}" for text in problems)
            raise CheckpointError(
                f"{self.path} has a different model:\n{lines}\nTo load it, set model.* to the "
                "values of "
                f"{self.path / CONFIG}."
            )

    def _check_names(self) -> None:
        expected = {rule.name for rule in self.rules}
        missing_keys = sorted(expected - self._tensors.keys())
        ignored = {name for name in self._tensors if self.family.ignored_tensors.fullmatch(name)}
        ignored |= {rule.name for rule in self.copies}
        unexpected_keys = sorted(self._tensors.keys() - expected - ignored - {self.family.head})
        problems = [f"missing: {show_names(name_experts(missing_keys))}"] if missing_keys else []
        problems += (
            [f"unexpected in {self.family.architecture}: {show_names(unexpected_keys)}"]
            if unexpected_keys
            else []
        )
        if missing_keys == [self.family.head]:
            problems = [
                f"{missing_keys[0]} is missing (set tie_word_embeddings to true if the head "
                "shares the "
                "weight of the embedding)"
            ]
        if problems:
            raise CheckpointError(
                f"{self.path}: its tensors do not match its config.json; "
                f"{'; '.join(problems)}. "
                f"Copy the folder again, or use the config.json that came with the weights."
            )

    def _check_shapes(self) -> None:
        checked = [
            (rules[0], self._tensors[name]) for name, rules in group_by_tensor(self.rules).items()
        ]
        problems = [
            f"{rule.name} is {list(info.shape)}, expected {list(rule.shape)}"
            for rule, info in checked
            if info.shape != rule.shape
        ]
        problems += [
            f"{rule.name} is stored as {info.dtype}, expected one of {', '.join(DTYPES)}"
            for rule, info in checked
            if info.dtype not in DTYPES
        ]
        if problems:
            more = f"; and {len(problems) - 6} more" if len(problems) > 6 else ""
            raise CheckpointError(
                f"{self.path}: {'; '.join(problems[:6])}{more}. "
                f"Use the config.json that came with the weights."
            )

    def _check_tied(self) -> None:
        """Check that the head tensor of a tied model, if it is stored, equals the embedding."""
        if self.family.head not in self._tensors or not self.model_config.tied_embeddings:
            return
        table = self._rules["embed.weight"][0]
        if not self._equals_table(self.family.head, table):
            raise CheckpointError(
                f"{self.path}: tie_word_embeddings=true, but {self.family.head} differs from "
                f"{table.name}. "
                f"Set tie_word_embeddings to false in config.json if the head has separate weights."
            )

    def _check_copies(self) -> None:
        """Check that tensors that repeat a parameter are equal to it."""
        for copy in self.copies:
            assert copy.parameter is not None
            (first,) = self._rules[copy.parameter]
            if not self._equals_table(copy.name, first):
                raise CheckpointError(
                    f"{self.path}: {copy.name} differs from {first.name}, but both are the "
                    f"parameter {copy.parameter}. Remove {copy.name} from the folder to use "
                    f"{first.name} for both."
                )

    def _equals_table(self, name: str, table: TensorRule) -> bool:
        """Return whether a tensor equals the matrix of `table`, compared a piece at a time."""
        info, rows = self._tensors[name], max(1, PIECE_NBYTES // (8 * table.shape[1]))
        if info.dtype not in DTYPES or info.shape != table.shape:
            return False
        return all(
            torch.equal(
                *(
                    self._read(tensor_name, (slice(start, start + rows), slice(None)))
                    for tensor_name in (name, table.name)
                )
            )
            for start in range(0, table.shape[0], rows)
        )


def _activation_names(raw: Mapping[str, Any], model: ModelConfig) -> dict[str, str]:  # Any: JSON
    """Return the fields of config.json that name the activation of `model`."""
    names = {field: raw.get(field) for field in ACTIVATION_FIELDS}
    return {
        field: name
        for field, name in names.items()
        if isinstance(name, str) and _is_activation_name(name, model)
    }


def _is_activation_name(name: str, model: ModelConfig) -> bool:
    """Return whether `name` is a Hugging Face name of the model's activation."""
    return ACTIVATIONS.get(name) == model.activation


def find_family(raw: Mapping[str, Any], path: Path) -> tuple[Family, WrapperFamily | None]:
    """Return the family of a config.json, and the multimodal wrapper if the config is of one.

    Raises:
        CheckpointError: its architecture is not supported.
    """
    names = raw.get("architectures") or []
    for family in FAMILIES:
        for architecture in (family, family.wrapper):
            if architecture is not None and _has_architecture(raw, architecture):
                _reject_custom_code(raw, architecture.architecture, path)
                return family, family.wrapper if architecture is family.wrapper else None
    shown = ", ".join(map(str, names)) or f"model_type {raw.get('model_type')}"
    known = ", ".join(family.architecture for family in FAMILIES)
    raise CheckpointError(f"{path}: the architecture {shown} is not supported. Use one of {known}.")


def _has_architecture(raw: Mapping[str, Any], architecture: Family | WrapperFamily) -> bool:
    names = raw.get("architectures") or []
    return architecture.architecture in names or (
        not names and raw.get("model_type") == architecture.model_type
    )


def _inner_config(raw: Mapping[str, Any], outer: WrapperFamily, path: Path) -> dict[str, Any]:
    """Return the config of the text model, with the fields that the outer config shares.

    Raises:
        CheckpointError: there is none.
    """
    inner = raw.get(outer.section)
    if not isinstance(inner, dict):
        raise CheckpointError(
            f"{path / CONFIG}: {outer.section}={inner!r:.60}: expected the config of a text "
            f"model. Use the config.json that came with the weights."
        )
    shared = {
        name: raw[name]
        for name in (*TOKEN_IDS, QUANTISED, "tie_word_embeddings")
        if raw.get(name) is not None
    }
    return shared | {
        name: value for name, value in inner.items() if value is not None or name not in shared
    }


def _reject_custom_code(raw: Mapping[str, Any], architecture: str, path: Path) -> None:
    """Reject models that need custom code, which is not run.

    auto_map that names a class of transformers is accepted as an older copy of that class (Phi-3,
    DeepSeek).

    Raises:
        CheckpointError: it names another class.
    """
    auto_map = raw.get("auto_map") or {}
    model = auto_map.get("AutoModelForCausalLM") if isinstance(auto_map, dict) else auto_map
    if model is not None and str(model).rsplit(".", 1)[-1] != architecture:
        raise CheckpointError(
            f"{path / CONFIG}: auto_map={auto_map!r:.120}: the model needs custom code, which is "
            "not run. "
            "Use a folder that transformers loads without trust_remote_code, or remove auto_map "
            f"if the model is the same as {architecture}."
        )


def find_exporting_family(config: ModelConfig) -> Family:
    """Return the first family that can express a model.

    Raises:
        ConfigError: there is none; the message is that of the family with the fewest unsupported
            settings.
    """
    errors: list[ConfigError] = []
    for family in FAMILIES:
        try:
            family.write_config(config)
        except ConfigError as error:
            errors.append(error)
        else:
            return family
    raise min(errors, key=_count_unexported_settings)


def _count_unexported_settings(error: ConfigError) -> float:
    """Return how many settings a family cannot express; infinity if it is another kind of model."""
    return len(error.settings) if isinstance(error, UnexportedFieldsError) else math.inf


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        CheckpointError: there is no such file, or it holds something else.
    """
    try:
        raw = storage.parse_json(storage.read_bytes(file))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}). Use a folder that save_pretrained wrote."
        ) from error
    if not isinstance(raw, dict):
        raise CheckpointError(
            f"{file} holds {type(raw).__name__}; expected an object. Use the model's own file."
        )
    return raw


def _read_headers(path: Path) -> dict[str, TensorInfo]:
    """Return every tensor of the folder, from the headers of its files."""
    files = _list_weight_files(path)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        tensors |= read_header(file)
    if (path / INDEX).exists() and len(files) > 1:
        index = read_json(path / INDEX)["weight_map"]
        missing_keys = sorted(
            name
            for name, file in index.items()
            if name not in tensors or tensors[name].file.name != file
        )
        if missing_keys:
            raise CheckpointError(
                f"{path}: {INDEX} lists {show_names(missing_keys)}, which the files do not "
                "contain. "
                f"Copy the folder again, or use another one."
            )
    return tensors


def _list_weight_files(path: Path) -> list[Path]:
    if (path / WEIGHTS).exists():
        return [path / WEIGHTS]
    if (path / INDEX).exists():
        index = read_json(path / INDEX).get("weight_map")
        names = sorted({str(name) for name in index.values()}) if isinstance(index, dict) else []
        outside = [
            name
            for name in names
            if Path(name).name != name or len(name.encode(errors="replace")) > 255
        ]
        missing = [] if outside else [name for name in names if not (path / name).exists()]
        if not names or outside or missing:
            shown = show_names(outside or missing) or "nothing"
            reason = "which are missing" if missing and not outside else "not files of this folder"
            raise CheckpointError(
                f"{path / INDEX} names {shown}, {reason}. Copy the folder again, or use another "
                "one."
            )
        return [path / name for name in names]
    other_files = [
        name
        for name in storage.list_names(path)
        if re.search(r"\.(bin|pt|pth|safetensors|gguf)$", name)
    ]
    raise CheckpointError(
        f"{path} has neither {WEIGHTS} nor {INDEX} (found: "
        f"{show_names(other_files) or 'no weights'}). "
        "Use safetensors: "
        f"save_pretrained of transformers writes them."
    )


# --- writing


Parts = Sequence[TensorRule]
"""The rules of one Hugging Face tensor."""


def plan_files(
    rules: Sequence[TensorRule], dtype_of: Callable[[Parts], torch.dtype], shard_nbytes: int
) -> list[list[tuple[Parts, PlannedTensor]]]:
    """Return the tensors of each file, in order; a file has at most `shard_nbytes`, or one
    tensor."""
    files: list[list[tuple[Parts, PlannedTensor]]] = []
    remaining_nbytes = 0
    for name, parts in group_by_tensor(rules).items():
        planned = PlannedTensor(name, dtype_of(parts), parts[0].shape)
        if planned.nbytes > remaining_nbytes or not files:
            files.append([])
            remaining_nbytes = shard_nbytes
        files[-1].append((parts, planned))
        remaining_nbytes -= planned.nbytes
    return files


def _is_expert_bias(part: TensorRule) -> bool:
    """Return whether the tensor is an expert bias, which is stored in a wider dtype than the
    model."""
    return part.parameter is not None and part.parameter.endswith(BALANCING_BIAS)


def write_folder(
    path: Path,
    config: ModelConfig,
    weights: Weights,
    options: ConversionOptions = CONVERSION,
    *,
    hf_source: HFSource | None = None,
    shard_nbytes: int = 5 * 10**9,
    extra: Mapping[str, Any] | None = None,  # JSON
    auxiliary_files: Mapping[str, bytes] | None = None,
) -> int:
    """Write a folder that `from_pretrained` loads, if transformers has the family, and return its
    bytes of weights.

    The folder appears complete or not at all. `hf_source`: its family, and names that replace
    equivalent ones in config.json (`gelu_new`); unset: the first family that can express the model.
    `extra` are additional fields of config.json (token ids), `auxiliary_files` are further files by
    name. A file has at most `shard_nbytes`, or one tensor.

    Raises:
        CheckpointError: the path exists, or writing failed.
        ConfigError: the family cannot express the model.
    """
    hf_source = hf_source or HFSource(find_exporting_family(config))
    family = hf_source.family
    raw = family.write_config(config)
    names = {
        field: name
        for field, name in hf_source.activation_names.items()
        if field in raw and _is_activation_name(name, config)
    }
    raw |= names | dict.fromkeys(TOKEN_IDS) | dict(extra or {})
    rules = [*family.rules(config), *family.copies(config)]

    def dtype_of(parts: Parts) -> torch.dtype:
        # Tensors of zeros, which have no parameter, get the dtype of the embedding.
        sources = [rule.parameter or "embed.weight" for rule in parts]
        return dtype_to_write(
            sources[0], reduce(torch.promote_types, map(weights.dtype, sources)), options.dtype
        )

    files = plan_files(rules, dtype_of, shard_nbytes)
    dtypes = [
        planned.dtype for file in files for (part, *_), planned in file if not _is_expert_bias(part)
    ]
    widest = max(dtypes, key=lambda dtype: dtype.itemsize)
    raw["dtype"] = raw["torch_dtype"] = str(widest).removeprefix("torch.")  # transformers 5, and 4
    with open_staging(path, options.attempt) as work:
        staging = work.folder / "folder"
        total = _write_weights(staging, files, weights, options, work.journal)
        for name, contents in (auxiliary_files or {}).items():
            storage.write_new(staging / name, contents)
        for name, document in {CONFIG: raw, GENERATION: _make_generation_config(raw)}.items():
            if not (staging / name).exists():
                storage.write_new(staging / name, (json.dumps(document, indent=2) + "\n").encode())
        storage.sync_folder(staging)
        publish(work, staging, path)
    return total


def check_free_space(folder: Path, nbytes: int) -> None:
    """Check that the disk of `folder` has enough free space.

    Raises:
        CheckpointError: it has less than `nbytes` free.
    """
    free = storage.free_nbytes(folder)
    if nbytes > free:
        raise CheckpointError(
            f"{folder.parent} has {show_bytes(free)} free, but {show_bytes(nbytes)} are needed. "
            "Free some space, choose another target, or set --dtype to a smaller dtype."
        )


def _write_weights(
    staging: Path,
    files: Sequence[Sequence[tuple[Parts, PlannedTensor]]],
    weights: Weights,
    options: ConversionOptions,
    journal: ConversionJournal,
) -> int:
    """Write all weight files, and the index if there are several; returns the bytes of all
    tensors."""
    names = (
        [WEIGHTS]
        if len(files) == 1
        else [_shard_name(i, len(files)) for i in range(1, len(files) + 1)]
    )
    plans = {
        name: [planned for _, planned in content]
        for name, content in zip(names, files, strict=True)
    }
    allocated = _find_allocated_files(staging, plans)
    jobs: list[_Job] = []
    for name, content in zip(names, files, strict=True):
        offsets = allocated.get(name) or allocate_file(staging / name, plans[name], METADATA)
        for batch in split_by_nbytes(
            list(zip(offsets, content, strict=True)), lambda item: item[1][1].nbytes, BATCH_NBYTES
        ):
            tensors, journal_key = [item for _, item in batch], f"{name}@{batch[0][0]}"
            record = journal.get(journal_key) if name in allocated else None
            jobs.append(_Job(staging / name, batch[0][0], tensors, journal_key, record))
    check_free_space(staging.parent, sum(job.nbytes for job in jobs if job.before is None))
    total = sum(
        run_in_order(
            [partial(_write_job, job, weights, options.on_written, journal) for job in jobs],
            options.workers,
        )
    )
    for name in names:
        storage.sync_written(staging / name)
    if len(files) > 1:
        weight_map = {
            planned.name: name
            for name, content in zip(names, files, strict=True)
            for _, planned in content
        }
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        storage.write_new(staging / INDEX, (json.dumps(index, indent=2) + "\n").encode())
    return total


def _find_allocated_files(
    staging: Path, plans: Mapping[str, Sequence[PlannedTensor]]
) -> dict[str, list[int]]:
    """Return the files that an interrupted conversion allocated for these plans, with the offsets
    of their tensors; other files are removed."""
    if not staging.exists():
        storage.make_folder(staging)
    offsets_of = {
        name: find_allocated_file(staging / name, plan, METADATA) for name, plan in plans.items()
    }
    allocated = {name: offsets for name, offsets in offsets_of.items() if offsets is not None}
    for name in storage.list_names(staging):
        if name not in allocated:
            storage.remove_file(staging / name)
    return allocated


@dataclass(frozen=True, slots=True)
class _Job:
    """Adjacent tensors of a weight file that are written at once."""

    file: Path
    start: int
    content: Sequence[tuple[Parts, PlannedTensor]]
    name: str
    """Key in the journal."""

    before: Any | None  # JSON
    """Checksum of the bytes if they are already written."""

    @property
    def nbytes(self) -> int:
        return sum(planned.nbytes for _, planned in self.content)


def _write_job(
    job: _Job, weights: Weights, on_written: Callable[[int], None], journal: ConversionJournal
) -> int:
    """Write the tensors of a job unless they are already written; returns their bytes."""
    if job.before is not None and job.before == part_checksum(job.file, job.start, job.nbytes):
        on_written(job.nbytes)
        return job.nbytes
    part = write_part(job.file, job.start, _read_tensors(job.content, weights, on_written))
    # A gap would silently read as zeros.
    assert part.stop == job.start + job.nbytes, (job.file.name, job.start, part.stop, job.nbytes)
    journal.add(job.name, part.checksum)
    return job.nbytes


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _read_tensors(
    content: Sequence[tuple[Parts, PlannedTensor]],
    weights: Weights,
    on_written: Callable[[int], None],
) -> Iterator[Tensor]:
    """Yield the values of the tensors in file order, in one or more pieces each."""
    for parts, planned in content:
        first = parts[0]
        if first.parameter is not None and first.covers_tensor and first.keeps_order:
            for box in divide(first.box, PIECE_NBYTES // planned.dtype.itemsize):
                yield weights.read(first.parameter, box, planned.dtype)
        elif first.parameter is not None and first.covers_tensor:
            yield to_tensor_layout(first, weights.read(first.parameter, first.box, planned.dtype))
        else:
            yield _assemble_tensor(parts, planned, weights)
        on_written(planned.nbytes)


def _assemble_tensor(parts: Parts, planned: PlannedTensor, weights: Weights) -> Tensor:
    """Return a tensor assembled from the parameter boxes it consists of."""
    values = torch.zeros(planned.shape, dtype=planned.dtype)
    for rule in parts:
        if rule.parameter is not None:
            target = values.view(rule.view)[tuple(slice(start, stop) for start, stop in rule.at)]
            target.copy_(
                to_row_major(
                    to_tensor_layout(rule, weights.read(rule.parameter, rule.box, planned.dtype))
                )
            )
    return values


def _make_generation_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return generation_config.json with the token ids that begin and end a text."""
    ids = {name: raw[name] for name in TOKEN_IDS if raw.get(name) is not None}
    return {"_from_model_config": True, **ids}


def list_auxiliary_files(folder: Path) -> dict[str, Path]:
    """Return the auxiliary files of a folder, by name.

    Raises:
        CheckpointError: one of them is a link that leads out of the folder.
    """
    check_links(folder, AUXILIARY_FILES)
    return {name: folder / name for name in AUXILIARY_FILES if (folder / name).is_file()}


def check_links(folder: Path, names: Iterable[str]) -> None:
    """Reject symbolic links that lead out of a folder, where they could expose any file of the
    machine.

    Snapshots in the cache of the Hugging Face hub consist of links into `blobs` of the repository,
    which are allowed.

    Raises:
        CheckpointError: one of `names` is such a link.
    """
    root = Path(os.path.realpath(folder))
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    for name in names:
        target = Path(os.path.realpath(folder / name))
        if (folder / name).is_symlink() and not any(
            target.is_relative_to(place) for place in allowed
        ):
            raise CheckpointError(
                f"{folder / name} is a link to {target}, outside of its folder; such links are "
                f"not followed. Replace it by a copy of the file, or remove it."
            )
