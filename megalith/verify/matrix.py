"""Matrix of layouts that must equal one process: every axis, its variants, and combinations of
axes.

The rows are data (`matrix.yaml`). The layout tests and `megalith verify --all` use the same rows.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megalith.config.checkpoint import CheckpointConfig
from megalith.config.fields import Plain
from megalith.config.lora import LoraConfig
from megalith.config.model import ModelConfig
from megalith.config.optim import TRAIN_ALL, OptimConfig
from megalith.config.parallel import OffloadConfig, ParallelConfig, RecomputeConfig
from megalith.config.tree import from_dict, parse_yaml, to_dict
from megalith.errors import ConfigError, did_you_mean
from megalith.verify.ranks import LayoutCase, MaskKind, choose_micro_batch_size, layout_case
from megalith.verify.tiny_models import MODELS


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One row of the matrix: a tiny model and its parallel layout."""

    area: str
    name: str
    model: ModelConfig
    parallel: ParallelConfig
    rows: int | None = None
    """Rows per microbatch, of 12 per step; None: `choose_micro_batch_size`."""

    seq_len: int = 12
    budget: int | None = None
    """Tokens per cp rank of a pack of whole documents; None: rows."""

    documents: bool = False
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)

    smoothing: float = 0.0
    """Label smoothing."""

    z_loss: float = 0.0
    recomputed_loss: bool = False
    """Recompute logits in backward."""

    lora: LoraConfig | None = None
    optim: OptimConfig = TRAIN_ALL
    """Frozen parameters and parameter groups."""

    masks: MaskKind | None = None
    """Attention masks of the tokens."""

    sample: bool = False
    """Part of the small sample that covers every feature on at most four processes, for `make test`
    and `megalith verify --all --sample`."""

    @property
    def world(self) -> int:
        """Number of processes."""
        p = self.parallel
        return p.tp * p.cp * p.pp * (p.dp or 1)

    def case(self) -> LayoutCase:
        """Return the float64 case of this row."""
        case = layout_case(
            self.model,
            self.parallel,
            self.world,
            seq_len=self.seq_len,
            documents=self.documents,
            micro_batch_size=self.rows or choose_micro_batch_size(self.parallel),
        )
        # A rule requires the base checkpoint of adapters; here it is initialized randomly.
        base = CheckpointConfig(load=None if self.lora is None else "base")
        run = replace(
            case.run,
            recompute=self.recompute,
            offload=self.offload,
            lora=self.lora,
            checkpoint=base,
            optim=replace(self.optim, eps=case.run.optim.eps),
            train=replace(
                case.run.train,
                label_smoothing=self.smoothing,
                z_loss=self.z_loss,
                loss_backward="recomputed" if self.recomputed_loss else "kept",
                loss_chunk=7 if self.recomputed_loss else None,
                tokens_per_microbatch=self.budget,
            ),
        )
        return replace(case, run=run, masks=self.masks)


def row_length(parallel: ParallelConfig) -> int:
    """Return the tokens per row that the ranks can shard."""
    parts = 2 * parallel.cp * (parallel.tp if parallel.sp else 1)
    return -(-12 // parts) * parts if parallel.cp > 1 else 12


@functools.cache
def load_matrix() -> tuple[Layout, ...]:
    """Return every row of the matrix."""
    areas = _read_tables()["rows"]
    return tuple(
        parse_row(area, name, text) for area, rows in areas.items() for name, text in rows.items()
    )


def matrix_rows(*, sample: bool) -> list[Layout]:
    """Return the rows, those with few processes first, so that workers are started when needed."""
    rows = (row for row in load_matrix() if row.sample or not sample)
    return sorted(rows, key=lambda row: row.world)


def parse_row(area: str, name: str, text: str) -> Layout:
    """Return the row of a line of `matrix.yaml`.

    Raises:
        ConfigError: the model or a word is unknown.
    """
    model, *words = text.split()
    if model not in MODELS:
        advice = did_you_mean(model, list(MODELS)) or ""
        raise ConfigError(f"{area}, {name}: {model} is not a model of the matrix.{advice}")
    settings = _parse_words(words)
    fields: dict[str, Any] = {  # Any: fields of `Layout`
        key: from_dict(SECTIONS[key], value) if key in SECTIONS else value
        for key, value in settings.items()
    }
    overrides = fields.pop("model", None)
    if overrides:
        fields["model"] = from_dict(ModelConfig, _merge(to_dict(MODELS[model]), overrides))
    fields.setdefault("model", MODELS[model])
    fields.setdefault("seq_len", row_length(fields["parallel"]))
    return Layout(area=area, name=name, **fields)


def parse_parallel(text: str) -> ParallelConfig:
    """Return the layout of words such as `tp2 pp2 sp zb-v vpp2`; dp is 1 unless given."""
    return from_dict(ParallelConfig, _parse_words(text.split())["parallel"])


SECTIONS: Mapping[str, type] = {
    "parallel": ParallelConfig,
    "recompute": RecomputeConfig,
    "offload": OffloadConfig,
    "lora": LoraConfig,
    "optim": OptimConfig,
}
"""Fields of a row that are configs."""

DEGREES = {"vpp": "parallel.pipeline.vpp"} | {
    name: f"parallel.{name}" for name in ("tp", "cp", "pp", "dp", "ep", "etp", "zero")
}
"""Word without its number -> setting."""


@functools.cache
def _read_tables() -> dict[str, dict[str, Any]]:  # Any: YAML
    tables = parse_yaml((Path(__file__).parent / "matrix.yaml").read_text(encoding="utf-8"))
    assert isinstance(tables, dict)
    return tables


def _parse_words(words: Sequence[str]) -> dict[str, Any]:  # Any: nested settings
    """Return the settings of a row as nested dicts; later words take precedence."""
    tables = _read_tables()
    settings: dict[str, Any] = {"parallel": {"dp": 1}}
    for word in words:
        path, has_value, value = word.partition("=")
        degree = re.fullmatch(r"([a-z]+)(\d+)", word)
        if has_value:
            values = _nest(tables["short"].get(path, path), _parse_value(value))
        elif degree and degree[1] in DEGREES:
            values = _nest(DEGREES[degree[1]], int(degree[2]))
        elif word in tables["words"]:
            values = tables["words"][word]
        else:
            advice = did_you_mean(word, list(tables["words"])) or ""
            raise ConfigError(f"{' '.join(words)}: {word} is not a word of matrix.yaml.{advice}")
        settings = _merge(settings, values)
    return settings


def _nest(path: str, value: Plain) -> dict[str, Plain]:
    """Return nested dicts with one leaf at a dotted path."""
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def _parse_value(text: str) -> Plain:
    """Parse a number, a word, or a list of them in brackets; patterns of names are words."""
    if text.startswith("[") and text.endswith("]"):
        return [_parse_value(item) for item in text[1:-1].split(",") if item]
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


def _merge(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return `before` with the leaves of `after`."""
    merged = dict(before)
    for key, value in after.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if nested else value
    return merged
