"""Hugging Face folders: config.json and safetensors, read box by box and written tensor by
tensor."""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megalith import storage
from megalith.checkpoint.boxes import (
    CheckpointEntry,
    TensorPiece,
    divide,
    inner_view,
    laid_out,
    lengths,
    numel,
    pieces,
)
from megalith.checkpoint.format import show_bytes, show_dtype
from megalith.checkpoint.safetensors import (
    DTYPES,
    READABLE,
    Planned,
    TensorInfo,
    allocate_file,
    allocated_file,
    part_checksum,
    read_box,
    read_header,
    show_names,
    write_part,
)
from megalith.checkpoint.strictness import name_experts
from megalith.config.checkpoint import NewRows
from megalith.config.model import ModelConfig
from megalith.config.suggest import did_you_mean
from megalith.errors import CheckpointError, ConfigError
from megalith.models.decilm import DECILM
from megalith.models.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from megalith.models.fields import ACTIVATIONS, in_their_words
from megalith.models.gemma import GEMMA
from megalith.models.gemma2 import GEMMA2
from megalith.models.gemma3 import GEMMA3
from megalith.models.gpt2 import GPT2
from megalith.models.gpt_oss import GPT_OSS
from megalith.models.granite import GRANITE
from megalith.models.jobs import batches, done_in_order
from megalith.models.journal import Attempt, ConversionJournal
from megalith.models.llama import LLAMA
from megalith.models.llama4 import LLAMA4
from megalith.models.mistral import MISTRAL
from megalith.models.mixtral import MIXTRAL
from megalith.models.names import (
    BALANCING_BIAS,
    Family,
    Outer,
    TensorRule,
    as_stored,
    by_parameter,
    by_tensor,
    dtype_to_write,
    extent,
    in_our_order,
    in_their_order,
    region_of,
    rules_of,
)
from megalith.models.neox import NEOX
from megalith.models.olmo2 import OLMO2
from megalith.models.olmoe import OLMOE
from megalith.models.phi3 import PHI3
from megalith.models.quantised import FIELD as QUANTISED
from megalith.models.quantised import DequantizedTensor, dequantize
from megalith.models.qwen2 import QWEN2
from megalith.models.qwen2_moe import QWEN2_MOE
from megalith.models.qwen3 import QWEN3
from megalith.models.qwen3_moe import QWEN3_MOE
from megalith.models.smollm3 import SMOLLM3
from megalith.models.staging import publish, work_on
from megalith.models.starcoder2 import STARCODER2
from megalith.models.usual import UnexportedFieldsError
from megalith.plan.network import network_problems
from megalith.plan.shards import Box, Shard, intersect

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    OLMO2,
    SMOLLM3,
    GRANITE,
    PHI3,
    STARCODER2,
    GPT2,
    NEOX,
    DEEPSEEK_V3,
    DEEPSEEK_V2,
    MIXTRAL,
    QWEN3_MOE,
    QWEN2_MOE,
    OLMOE,
    GPT_OSS,
    LLAMA4,
    DECILM,
)
"""Every architecture that can be read and written; a model that several have words for is written
as the first."""

PADDED = ("embed.weight", "head.weight")
"""Our tables whose rows may be more than their tensors have; the rows added are zero, or the mean
of the others."""

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
METADATA = {"format": "pt"}
"""What transformers wants to read in a file of weights."""

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
LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "USE_POLICY.md")
"""Files that go with whatever is made from the weights."""

AUXILIARY_FILES = (*TOKENIZER_FILES, GENERATION, *LICENSES)
"""Files that go with the weights as they are."""

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of config.json that are about text; unset they would default to ids of the first Llama's
tokenizer."""

ACTIVATION_FIELDS = ("hidden_act", "hidden_activation", "activation_function")
"""Fields of config.json that name the activation; some functions have several names."""

PIECE_NBYTES = 64 * 2**20
"""Read at once (guess: large enough for a disk, small beside any model)."""

BATCH_NBYTES = 128 * 2**20
"""Written by one worker before it waits for the disk, at least (guess)."""


@dataclass(frozen=True, slots=True)
class HFSource:
    """Which Hugging Face model a checkpoint was converted from, as far as its ModelConfig does not
    say it."""

    family: Family
    activation_names: Mapping[str, str]
    """Fields of config.json that name the activation, as they were."""

    def as_json(self) -> dict[str, Any]:
        """Return the record for the state of a checkpoint."""
        return {
            "architecture": self.family.architecture,
            "activation_names": dict(self.activation_names),
        }


def parse_hf_source(record: Any, checkpoint_path: Path) -> HFSource:  # Any: JSON
    """Return what `HFSource.as_json` wrote into a checkpoint.

    Raises:
        CheckpointError: the record is damaged, or names an architecture that is not supported.
    """
    fields = record if isinstance(record, dict) else {}
    by_architecture = {family.architecture: family for family in FAMILIES}
    architecture, names = fields.get("architecture"), fields.get("activation_names")
    known = isinstance(architecture, str) and architecture in by_architecture
    if (
        not known
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
        ConfigError: there is none; `setting` is where the name was given.
    """
    for family in FAMILIES:
        if name in (family.model_type, family.architecture):
            return family
    model_types = [family.model_type for family in FAMILIES]
    raise ConfigError(
        f"{setting}={name}: there is no such family.{did_you_mean(name, model_types)} Use one of "
        f"{', '.join(model_types)}."
    )


class Weights(Protocol):
    """Somewhere that parameters can be read from by our names."""

    def dtype(self, parameter: str) -> torch.dtype:
        """As it is stored."""

    def read(self, parameter: str, box: Box, dtype: torch.dtype) -> Tensor:
        """A box of it, on the host, perhaps as a view of a file: not to be written to, nor kept for
        long.

        Rows that only pad a vocabulary may be left out by those who ask.
        """


class HuggingFaceFolder:
    """A folder with config.json and safetensors, checked whole when it is opened; values are read
    when asked for."""

    def __init__(self, path: Path) -> None:
        """Read the config and the headers.

        Raises:
            CheckpointError: it is no such folder, of an unsupported architecture, has links that
                lead out of it, or tensors are missing, surplus, of the wrong shape or cut off; each
                is named.
        """
        check_links(path, storage.list_names(path))
        self.path = path
        self.new_rows: NewRows = "zero"
        self._means: dict[str, Tensor] = {}
        raw = read_json(path / CONFIG)
        self.family, outer = find_family(raw, path)
        self.raw = raw if outer is None else _inner_config(raw, outer, path)
        try:
            promised = self.family.read_config(
                {name: self.raw[name] for name in self.raw if name != QUANTISED}
            )
        except ConfigError as error:
            raise CheckpointError(f"{path / CONFIG}: {error}") from error
        tensors = dequantize(self.raw, _stored(path), path)
        self.others = (
            {}
            if outer is None
            else {name: tensors[name] for name in tensors if outer.others.fullmatch(name)}
        )
        """Tensors of parts that are not read."""
        prefix = "" if outer is None else outer.prefix
        self._tensors = {
            name.removeprefix(prefix): tensors[name] for name in tensors if name not in self.others
        }
        self.model_config: ModelConfig = self.family.settle(promised, self._tensors.keys())
        if problems := network_problems(self.model_config, trains=False):
            told = " ".join(in_their_words(text, self.raw) for text in problems)
            raise CheckpointError(f"{path / CONFIG} describes a model that cannot be: {told}")
        self.source = HFSource(self.family, _activation_names(self.raw, self.model_config))
        names = self._tensors.keys()
        self.rules = as_stored(
            rules_of(self.family, self.model_config, names), self.family.prefix, names
        )
        self._rules = by_parameter(self.rules)
        self.copies = [
            rule for rule in self.family.copies(self.model_config) if rule.name in self._tensors
        ]
        """Tensors of it that repeat others."""
        self._check_names()
        self._check_shapes()
        self._check_tied()
        self._check_copies()

    def dtype(self, parameter: str) -> torch.dtype:
        """As stored; of the widest, where several tensors make one parameter."""
        dtypes = [DTYPES[self._tensors[rule.name].dtype] for rule in self._rules[parameter]]
        return reduce(torch.promote_types, dtypes)

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Of one tensor, by their name; where that is dequantized, what it is then."""
        return DTYPES[self._tensors[self._name(name)].dtype]

    def stored_as(self, name: str) -> str:
        """What the folder has it in: a dtype, which of a part that is not read may be any word
        of a header, or how few bits are dequantized."""
        stored = self.others.get(name) or self._tensors[self._name(name)]
        if isinstance(stored, DequantizedTensor):
            return f"{stored.kind} dequantized"
        return show_dtype(READABLE[stored.dtype]) if stored.dtype in READABLE else stored.dtype

    def _name(self, name: str) -> str:
        return name if name in self._tensors else name.removeprefix(self.family.prefix)

    def read(self, parameter: str, box: Box, dtype: torch.dtype) -> Tensor:
        """A box of one of our parameters, on the host: a view of the file, where one tensor has it
        all."""
        parts = [rule for rule in self._rules[parameter] if intersect(rule.box, box)]
        if len(parts) == 1 and intersect(parts[0].box, box) == box:
            return self._stored_box(parts[0], box).to(dtype)
        values = torch.empty(lengths(box), dtype=dtype)
        self._fill_piece(parameter, TensorPiece(box, values))
        return values

    def fill(self, entries: Sequence[CheckpointEntry]) -> None:
        """Fill the tensors of `entries`, reading only their boxes, a piece at a time; rows that the
        folder lacks become what `new_rows` says.

        Raises:
            CheckpointError: a parameter that the folder lacks, or of another shape.
        """
        self._check_wanted([entry.shard for entry in entries])
        for entry in entries:
            wide = max(entry.tensor.element_size(), self.dtype(entry.shard.name).itemsize)
            for piece in pieces(entry, max_numel=PIECE_NBYTES // wide):
                self._fill_piece(entry.shard.name, piece)

    def _fill_piece(self, parameter: str, piece: TensorPiece) -> None:
        left = numel(piece.box)
        parts = [
            (rule, both)
            for rule in self._rules[parameter]
            if (both := intersect(rule.box, piece.box))
        ]
        left -= sum(numel(part) for _, part in parts)
        if left:
            piece.values.zero_()
            if self.new_rows == "mean" and parameter in PADDED:
                self._fill_new_rows(parameter, piece)
        for rule, part in parts:
            inner_view(piece, part).copy_(self._stored_box(rule, part))

    def added_rows(self, shards: Sequence[Shard]) -> int:
        """How many rows the tables among these have that the folder's have not."""
        tables = [shard for shard in shards if shard.name in PADDED and shard.name in self._rules]
        return sum(max(0, shard.shape[0] - extent(self._rules[shard.name])[0]) for shard in tables)

    def _fill_new_rows(self, parameter: str, piece: TensorPiece) -> None:
        """Rows behind the folder's own are the mean of those."""
        rows = extent(self._rules[parameter])[0]
        (start, stop), *columns = piece.box
        if parameter not in self._means:  # two threads may both count it: they find the same
            self._means[parameter] = self._mean_row(parameter)
        mean = self._means[parameter][tuple(slice(*column) for column in columns)]
        inner_view(piece, ((max(rows, start), stop), *columns)).copy_(mean)

    def _mean_row(self, parameter: str) -> Tensor:
        """In float64, a piece at a time."""
        rows, *features = extent(self._rules[parameter])
        total, step = (
            torch.zeros(features, dtype=torch.float64),
            max(1, PIECE_NBYTES // (8 * math.prod(features))),
        )
        for start in range(0, rows, step):
            box = ((start, min(start + step, rows)), *((0, size) for size in features))
            total += self.read(parameter, box, torch.float64).sum(0)
        return total / rows

    def _stored_box(self, rule: TensorRule, part: Box) -> Tensor:
        """What a part of a rule's box is filled with, its dims in our order."""
        region = region_of(rule, part)
        stored = self._read(rule.name, region.slices)
        return in_our_order(rule, stored.reshape(region.view)[region.at])

    def _read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """A box of one of their tensors."""
        info = self._tensors[name]
        return (
            info.read(part) if isinstance(info, DequantizedTensor) else read_box(name, info, part)
        )

    def _check_wanted(self, shards: Sequence[Shard]) -> None:
        problems = []
        for shard in shards:
            if shard.name not in self._rules:
                problems.append(f"{shard.name} is in this run and not in the folder")
                continue
            theirs = extent(self._rules[shard.name])
            padded = shard.name in PADDED and shard.shape[0] >= theirs[0]
            if shard.shape != ((shard.shape[0], *theirs[1:]) if padded else theirs):
                problems.append(
                    f"{shard.name} is {list(shard.shape)} in this run and {list(theirs)} in the "
                    "folder"
                )
        if problems:
            lines = "\n".join(f"  {text}" for text in problems)
            raise CheckpointError(
                f"{self.path} is another model:\n{lines}\nTo load it, set model.* to what "
                f"{self.path / CONFIG} says."
            )

    def _check_names(self) -> None:
        wanted = {rule.name for rule in self.rules}
        missing = sorted(wanted - self._tensors.keys())
        ignored = {name for name in self._tensors if self.family.ignored.fullmatch(name)}
        ignored |= {rule.name for rule in self.copies}
        surplus = sorted(self._tensors.keys() - wanted - ignored - {self.family.tied})
        problems = [f"missing: {show_names(name_experts(missing))}"] if missing else []
        problems += (
            [f"not of a {self.family.architecture}: {show_names(surplus)}"] if surplus else []
        )
        if missing == [self.family.tied]:
            problems = [
                f"{missing[0]} is missing (set tie_word_embeddings to true if the embedding serves "
                "as head)"
            ]
        if problems:
            raise CheckpointError(
                f"{self.path}: its tensors are not those that its config.json describes; "
                f"{'; '.join(problems)}. "
                f"Copy the folder again, or use the config.json that came with the weights."
            )

    def _check_shapes(self) -> None:
        found = [(rules[0], self._tensors[name]) for name, rules in by_tensor(self.rules).items()]
        wrong = [
            f"{rule.name} is {list(info.shape)}, expected {list(rule.shape)}"
            for rule, info in found
            if info.shape != rule.shape
        ]
        wrong += [
            f"{rule.name} is stored as {info.dtype}, expected one of {', '.join(DTYPES)}"
            for rule, info in found
            if info.dtype not in DTYPES
        ]
        if wrong:
            more = f"; and {len(wrong) - 6} more" if len(wrong) > 6 else ""
            raise CheckpointError(
                f"{self.path}: {'; '.join(wrong[:6])}{more}. "
                f"Use the config.json that came with the weights."
            )

    def _check_tied(self) -> None:
        """A tied model may store its head as well, as long as it is the embedding."""
        if self.family.tied not in self._tensors or not self.model_config.tied_embeddings:
            return
        table = self._rules["embed.weight"][0]
        if not self._same(self.family.tied, table):
            raise CheckpointError(
                f"{self.path}: tie_word_embeddings=true, but {self.family.tied} differs from "
                f"{table.name}. "
                f"Set tie_word_embeddings to false in config.json if the head is one of its own."
            )

    def _check_copies(self) -> None:
        """What repeats a parameter must be it: there is one of each here."""
        for copy in self.copies:
            assert copy.parameter is not None
            (first,) = self._rules[copy.parameter]
            if not self._same(copy.name, first):
                raise CheckpointError(
                    f"{self.path}: {copy.name} differs from {first.name}, and a model here has one "
                    f"{copy.parameter} "
                    f"for both. Remove {copy.name} from the folder to use {first.name} in its "
                    "place."
                )

    def _same(self, name: str, table: TensorRule) -> bool:
        """Whether a tensor of theirs is equal to another, a matrix, in numbers; read a piece at a
        time."""
        info, rows = self._tensors[name], max(1, PIECE_NBYTES // (8 * table.shape[1]))
        if info.dtype not in DTYPES or info.shape != table.shape:
            return False
        return all(
            torch.equal(
                *(
                    self._read(one, (slice(start, start + rows), slice(None)))
                    for one in (name, table.name)
                )
            )
            for start in range(0, table.shape[0], rows)
        )


def _activation_names(raw: Mapping[str, Any], model: ModelConfig) -> dict[str, str]:  # Any: JSON
    """Return the fields of config.json that name the activation of `model`."""
    named = {field: raw.get(field) for field in ACTIVATION_FIELDS}
    return {
        field: name
        for field, name in named.items()
        if isinstance(name, str) and _names(name, model)
    }


def _names(name: str, model: ModelConfig) -> bool:
    """Return whether `name` is a Hugging Face name of the model's activation."""
    return ACTIVATIONS.get(name) == model.activation


def find_family(raw: Mapping[str, Any], path: Path) -> tuple[Family, Outer | None]:
    """The family of a config.json, and what it is inside of, if anything.

    Raises:
        CheckpointError: its architecture is not supported.
    """
    named = raw.get("architectures") or []
    for family in FAMILIES:
        for kind in (family, family.outer):
            if kind is not None and _is_of(raw, kind):
                _refuse_other_code(raw, kind.architecture, path)
                return family, family.outer if kind is family.outer else None
    found = ", ".join(map(str, named)) or f"model_type {raw.get('model_type')}"
    known = ", ".join(family.architecture for family in FAMILIES)
    raise CheckpointError(f"{path}: the architecture {found} is not supported. Use one of {known}.")


def _is_of(raw: Mapping[str, Any], kind: Family | Outer) -> bool:
    named = raw.get("architectures") or []
    return kind.architecture in named or (not named and raw.get("model_type") == kind.model_type)


def _inner_config(raw: Mapping[str, Any], outer: Outer, path: Path) -> dict[str, Any]:
    """The config of the model inside, with what the outer one says for both.

    Raises:
        CheckpointError: there is none.
    """
    inner = raw.get(outer.section)
    if not isinstance(inner, dict):
        raise CheckpointError(
            f"{path / CONFIG}: {outer.section}={inner!r:.60}: expected the settings of a model of "
            f"text. Use the config.json that came with the weights."
        )
    shared = {
        name: raw[name]
        for name in (*TOKEN_IDS, QUANTISED, "tie_word_embeddings")
        if raw.get(name) is not None
    }
    return shared | {
        name: value for name, value in inner.items() if value is not None or name not in shared
    }


def _refuse_other_code(raw: Mapping[str, Any], architecture: str, path: Path) -> None:
    """Code that came with a folder is not run. Where its model has the name of one of transformers'
    own, it is taken for an older copy of that, as those of Phi-3 and DeepSeek are; any other may
    compute anything.

    Raises:
        CheckpointError: it is another.
    """
    named = raw.get("auto_map") or {}
    model = named.get("AutoModelForCausalLM") if isinstance(named, dict) else named
    if model is not None and str(model).rsplit(".", 1)[-1] != architecture:
        raise CheckpointError(
            f"{path / CONFIG}: auto_map={named!r:.120}: the model is computed by code of its own, "
            "which is not run. "
            "Use a folder that transformers reads without trust_remote_code; or remove auto_map, "
            "if it computes what "
            f"{architecture} does."
        )


def family_for(config: ModelConfig) -> Family:
    """The first family that has words for all of a model.

    Raises:
        ConfigError: there is none; the text is that of the family which lacks the fewest.
    """
    refusals: list[ConfigError] = []
    for family in FAMILIES:
        try:
            family.write_config(config)
        except ConfigError as error:
            refusals.append(error)
        else:
            return family
    raise min(refusals, key=_number_lacking)


def _number_lacking(refusal: ConfigError) -> float:
    """How many settings a family has no words for; without end where the whole model is of another
    kind."""
    return len(refusal.settings) if isinstance(refusal, UnexportedFieldsError) else math.inf


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

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


def _stored(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of the folder, from the headers of its files."""
    files = _weight_files(path)
    found: dict[str, TensorInfo] = {}
    for file in files:
        found |= read_header(file)
    if (path / INDEX).exists() and len(files) > 1:
        index = read_json(path / INDEX)["weight_map"]
        lost = sorted(
            name
            for name, file in index.items()
            if name not in found or found[name].file.name != file
        )
        if lost:
            raise CheckpointError(
                f"{path}: {INDEX} promises {show_names(lost)}, which the files do not hold. "
                f"Copy the folder again, or use another one."
            )
    return found


def _weight_files(path: Path) -> list[Path]:
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
            wrong = show_names(outside or missing) or "nothing"
            what = (
                "which the folder lacks" if missing and not outside else "not files of this folder"
            )
            raise CheckpointError(
                f"{path / INDEX} names {wrong}, {what}. Copy the folder again, or use another one."
            )
        return [path / name for name in names]
    there = [
        name
        for name in storage.list_names(path)
        if re.search(r"\.(bin|pt|pth|safetensors|gguf)$", name)
    ]
    raise CheckpointError(
        f"{path} has neither {WEIGHTS} nor {INDEX} (found: {show_names(there) or 'no weights'}). "
        "Use safetensors: "
        f"save_pretrained of transformers writes them."
    )


# --- writing


Parts = Sequence[TensorRule]
"""The rules of one tensor of theirs."""


def plan_files(
    rules: Sequence[TensorRule], dtype_of: Callable[[Parts], torch.dtype], shard_nbytes: int
) -> list[list[tuple[Parts, Planned]]]:
    """The tensors of each file, in order; a file is at most `shard_nbytes`, or one tensor."""
    files: list[list[tuple[Parts, Planned]]] = []
    room = 0
    for name, parts in by_tensor(rules).items():
        planned = Planned(name, dtype_of(parts), parts[0].shape)
        if planned.nbytes > room or not files:
            files.append([])
            room = shard_nbytes
        files[-1].append((parts, planned))
        room -= planned.nbytes
    return files


def _is_bias_of_choice(part: TensorRule) -> bool:
    """Whether it is kept wider than the model is said to be."""
    return part.parameter is not None and part.parameter.endswith(BALANCING_BIAS)


def write_folder(
    path: Path,
    config: ModelConfig,
    weights: Weights,
    *,
    dtype: torch.dtype | None = None,
    shard_nbytes: int = 5 * 10**9,
    family: Family | None = None,
    activation_names: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,  # JSON
    auxiliary_files: Mapping[str, bytes] | None = None,
    wrote: Callable[[int], None] = lambda nbytes: None,
    workers: int = 1,
    attempt: Attempt | None = None,
) -> int:
    """Write a folder that `from_pretrained` reads, if transformers has the family; returns its
    bytes of weights. It appears whole or not at all.

    `dtype` unset keeps that of each parameter; `family` unset: the first that has words for the
    model. `activation_names` replace other names of the same function in config.json (`gelu_new`).
    `extra` goes into config.json (token ids), `auxiliary_files` are files beside it, by name;
    `wrote` is told the bytes of each tensor, by any of the `workers`, threads that have a few of
    the source's bytes in memory each. With an `attempt`, what an earlier one of the same kind left
    is gone on with.

    Raises:
        CheckpointError: the path exists, or the disk refused something.
        ConfigError: the family has no words for the model.
    """
    family = family or family_for(config)
    raw = family.write_config(config)
    names = {
        field: name
        for field, name in (activation_names or {}).items()
        if field in raw and _names(name, config)
    }
    raw |= names | dict.fromkeys(TOKEN_IDS) | dict(extra or {})
    rules = [*family.rules(config), *family.copies(config)]

    def dtype_of(parts: Parts) -> torch.dtype:
        sources = [
            rule.parameter or "embed.weight" for rule in parts
        ]  # zeros are stored like the rest
        return dtype_to_write(
            sources[0], reduce(torch.promote_types, map(weights.dtype, sources)), dtype
        )

    files = plan_files(rules, dtype_of, shard_nbytes)
    of_model = [
        one.dtype for file in files for (part, *_), one in file if not _is_bias_of_choice(part)
    ]
    widest = max(of_model, key=lambda dtype: dtype.itemsize)
    raw["dtype"] = raw["torch_dtype"] = str(widest).removeprefix("torch.")  # transformers 5, and 4
    with work_on(path, attempt) as work:
        staging = work.folder / "folder"
        total = _write_weights(staging, files, weights, wrote, workers, work.journal)
        for name, contents in (auxiliary_files or {}).items():
            storage.write_new(staging / name, contents)
        for name, document in {CONFIG: raw, GENERATION: _generation(raw)}.items():
            if not (staging / name).exists():
                storage.write_new(staging / name, (json.dumps(document, indent=2) + "\n").encode())
        storage.sync_folder(staging)
        publish(work, staging, path)
    return total


def require_room(folder: Path, nbytes: int) -> None:
    """Refuse to begin what the disk under `folder` has no room for.

    Raises:
        CheckpointError: it has less than `nbytes` free.
    """
    free = storage.free_nbytes(folder)
    if nbytes > free:
        raise CheckpointError(
            f"{folder.parent} has {show_bytes(free)} free, and {show_bytes(nbytes)} are to be "
            "written. Free some "
            f"space, choose another target, or set --dtype to a smaller one."
        )


def _write_weights(
    staging: Path,
    files: Sequence[Sequence[tuple[Parts, Planned]]],
    weights: Weights,
    wrote: Callable[[int], None],
    workers: int,
    journal: ConversionJournal,
) -> int:
    """Every file of weights, and the index when there are several; returns the bytes of all
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
    begun = _begun_files(staging, plans)
    jobs: list[_Job] = []
    for name, content in zip(names, files, strict=True):
        starts = begun.get(name) or allocate_file(staging / name, plans[name], METADATA)
        for batch in batches(
            list(zip(starts, content, strict=True)), lambda item: item[1][1].nbytes, BATCH_NBYTES
        ):
            tensors, known = [item for _, item in batch], f"{name}@{batch[0][0]}"
            before = journal.found(known) if name in begun else None
            jobs.append(_Job(staging / name, batch[0][0], tensors, known, before))
    require_room(staging.parent, sum(job.nbytes for job in jobs if job.before is None))
    total = sum(
        done_in_order([partial(_do, job, weights, wrote, journal) for job in jobs], workers)
    )
    for name in names:
        storage.sync_written(staging / name)
    if len(files) > 1:
        places = {
            planned.name: name
            for name, content in zip(names, files, strict=True)
            for _, planned in content
        }
        index = {"metadata": {"total_size": total}, "weight_map": places}
        storage.write_new(staging / INDEX, (json.dumps(index, indent=2) + "\n").encode())
    return total


def _begun_files(staging: Path, plans: Mapping[str, Sequence[Planned]]) -> dict[str, list[int]]:
    """The files that an earlier attempt has made of these plans, and where their tensors begin;
    others are removed."""
    if not staging.exists():
        storage.make_folder(staging)
    found = {name: allocated_file(staging / name, plan, METADATA) for name, plan in plans.items()}
    begun = {name: starts for name, starts in found.items() if starts is not None}
    for name in storage.list_names(staging):
        if name not in begun:
            storage.remove_file(staging / name)
    return begun


@dataclass(frozen=True, slots=True)
class _Job:
    """Some neighbors in a file of weights, which are written at once."""

    file: Path
    start: int
    content: Sequence[tuple[Parts, Planned]]
    name: str
    """In the journal."""

    before: Any | None  # JSON
    """What is known of bytes that are there already."""

    @property
    def nbytes(self) -> int:
        return sum(planned.nbytes for _, planned in self.content)


def _do(
    job: _Job, weights: Weights, wrote: Callable[[int], None], journal: ConversionJournal
) -> int:
    """Write some tensors, unless they are there; returns their bytes."""
    if job.before is not None and job.before == part_checksum(job.file, job.start, job.nbytes):
        wrote(job.nbytes)
        return job.nbytes
    part = write_part(job.file, job.start, _read_tensors(job.content, weights, wrote))
    # A hole would read as zeros, and nobody would know.
    assert part.stop == job.start + job.nbytes, (job.file.name, job.start, part.stop, job.nbytes)
    journal.add(job.name, part.checksum)
    return job.nbytes


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _read_tensors(
    content: Sequence[tuple[Parts, Planned]], weights: Weights, wrote: Callable[[int], None]
) -> Iterator[Tensor]:
    """Their values, in tensors one after the other."""
    for parts, planned in content:
        first = parts[0]
        if first.parameter is not None and first.whole and first.in_order:
            for box in divide(first.box, PIECE_NBYTES // planned.dtype.itemsize):
                yield weights.read(first.parameter, box, planned.dtype)
        elif first.parameter is not None and first.whole:
            yield in_their_order(first, weights.read(first.parameter, first.box, planned.dtype))
        else:
            yield _joined(parts, planned, weights)
        wrote(planned.nbytes)


def _joined(parts: Parts, planned: Planned, weights: Weights) -> Tensor:
    """One tensor of theirs from the boxes of ours that it is made of."""
    values = torch.zeros(planned.shape, dtype=planned.dtype)
    for rule in parts:
        if rule.parameter is not None:
            place = values.view(rule.view)[tuple(slice(start, stop) for start, stop in rule.at)]
            place.copy_(
                laid_out(
                    in_their_order(rule, weights.read(rule.parameter, rule.box, planned.dtype))
                )
            )
    return values


def _generation(raw: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json: the token ids that start and end a text."""
    ids = {name: raw[name] for name in TOKEN_IDS if raw.get(name) is not None}
    return {"_from_model_config": True, **ids}


def list_auxiliary_files(folder: Path) -> dict[str, Path]:
    """The files of a folder that go with its weights.

    Raises:
        CheckpointError: one of them is a link that leads out of the folder.
    """
    check_links(folder, AUXILIARY_FILES)
    return {name: folder / name for name in AUXILIARY_FILES if (folder / name).is_file()}


def check_links(folder: Path, names: Iterable[str]) -> None:
    """Reject symbolic links that lead out of a folder: behind them could be any file of this
    machine.

    A snapshot in the cache of the Hugging Face hub consists of links into the `blobs` folder of its
    repository, which stay allowed.

    Raises:
        CheckpointError: one of `names` is a link that leads elsewhere.
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
                f"{folder / name} is a link to {target}, outside of its folder, and such links are "
                f"not followed. Replace it by a copy of the file, or remove it."
            )
