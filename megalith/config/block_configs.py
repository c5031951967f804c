"""Read `block_configs`, the per-layer architecture of Nemotron (Puzzle) models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megalith.config.model import LayerPart, LayersConfig

ATTENTION_SIZES = ("n_heads_in_group", "num_query_groups", "num_key_value_heads")
"""Spellings of the number of KV heads of a layer; the first is the number of query heads per KV
head."""

MLP_SIZES = ("ffn_mult", "ffn_hidden_size", "intermediate_size")
"""Spellings of the MLP's intermediate size; the first is in units of 2/3 of the hidden size."""

FIXED: Mapping[str, object] = {"gated": True, "hidden_act": "silu"}
"""Required values of MLP fields, where they are set."""

SIZE_MULTIPLE = 256
"""Intermediate sizes computed from a multiplier are rounded up to a multiple of this."""

MAX_MULTIPLIER = 1_000_000
"""Largest accepted multiplier. Heuristic: the widest known model, T5 11B, has 96
(arXiv:1910.10683)."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBlocks:
    """Layer settings read from a list of blocks."""

    layers: LayersConfig
    """Patterns over the layers."""

    num_kv_heads: int
    """Largest number of KV heads of any layer."""

    ffn_hidden_size: int
    """Largest intermediate size of any layer."""

    problems: tuple[str, ...] = ()
    """Error messages; the other fields are valid only if there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockModelSizes:
    """Sizes of the model that the blocks belong to."""

    num_layers: int
    num_heads: int
    hidden_size: int
    num_kv_heads: int | None = None
    """Number of KV heads of attention blocks that do not set it. Unset: they must set it."""

    ffn_hidden_size: int | None = None
    """Intermediate size of MLP blocks that do not set it. Unset: they must set it."""


def read_blocks(entries: object, sizes: BlockModelSizes) -> LayerBlocks:
    """Convert a parsed list of blocks to layer settings. `sizes` are those of the whole model.

    Source: Bercovich et al. 2024, arXiv:2411.19146 (Puzzle).
    """
    if not isinstance(entries, list) or len(entries) != sizes.num_layers:
        actual = f"{len(entries)} entries" if isinstance(entries, list) else f"{entries!r:.60}"
        text = (
            f"block_configs has {actual}, expected a list with one for each of "
            f"{sizes.num_layers} layers."
        )
        return LayerBlocks(
            layers=LayersConfig(), num_kv_heads=1, ffn_hidden_size=1, problems=(text,)
        )
    problems: list[str] = []
    heads = [
        _BlockPart(entry, f"block_configs[{n}]", ("attention",), problems)
        for n, entry in enumerate(entries)
    ]
    mlps = [
        _BlockPart(entry, f"block_configs[{n}]", ("mlp", "ffn"), problems)
        for n, entry in enumerate(entries)
    ]
    keys = [half.key_value_heads(sizes) for half in heads]
    widths = [half.width(sizes) for half in mlps]
    for n, entry in enumerate(entries):
        _reject_unknown_fields(entry, f"block_configs[{n}]", ("attention", "mlp", "ffn"), problems)
    most = max(
        (count for count in keys if count is not None),
        default=sizes.num_kv_heads or sizes.num_heads,
    )
    widest = max(
        (width for width in widths if width is not None), default=sizes.ffn_hidden_size or 1
    )
    layers = LayersConfig(
        attention=_pattern([half.part for half in heads], "full"),
        mlp=_pattern([half.part for half in mlps], "full"),
        num_kv_heads=_pattern([most if count is None else count for count in keys], most),
        ffn_hidden_size=_pattern([widest if width is None else width for width in widths], widest),
    )
    return LayerBlocks(
        layers=layers, num_kv_heads=most, ffn_hidden_size=widest, problems=tuple(problems)
    )


def compute_ffn_size(multiplier: float, hidden_size: int) -> int:
    """Return the intermediate size of an MLP with this multiplier, which is at most
    `MAX_MULTIPLIER`.

    >>> compute_ffn_size(2.625, 8192), compute_ffn_size(1.3125, 4096)
    (14336, 3584)
    """
    return -(-int(2 * multiplier * hidden_size / 3) // SIZE_MULTIPLE) * SIZE_MULTIPLE


def find_ffn_multiplier(width: int, hidden_size: int) -> float | None:
    """Return a multiplier that gives this intermediate size; None if there is none.

    >>> find_ffn_multiplier(14336, 8192), find_ffn_multiplier(100, 8192)
    (2.625, None)
    """
    multiplier = 3 * width / (2 * hidden_size)
    is_exact = multiplier <= MAX_MULTIPLIER and compute_ffn_size(multiplier, hidden_size) == width
    return multiplier if is_exact else None


class _BlockPart:
    """Attention or MLP part of a block; errors are appended to `problems`."""

    def __init__(
        self, entry: object, where: str, names: Sequence[str], problems: list[str]
    ) -> None:
        self.problems, given = (
            problems,
            [name for name in names if isinstance(entry, dict) and name in entry],
        )
        self.where = f"{where}.{given[0] if given else names[-1]}"
        values = entry[given[0]] if isinstance(entry, dict) and len(given) == 1 else None
        if not isinstance(values, dict):
            shown = " and ".join(given) if len(given) > 1 else repr(values)[:60]
            problems.append(f"{where}: {shown}: expected an object for {' or '.join(names)}.")
        self.values: Mapping[str, Any] = values if isinstance(values, dict) else {"no_op": True}
        self.part = self._part()

    def _part(self) -> LayerPart:
        left_out, linear = self._read_flag("no_op"), self._read_flag("replace_with_linear")
        if left_out and linear:
            self.problems.append(
                f"{self.where}: no_op and replace_with_linear exclude each other. Remove one of "
                "them."
            )
        return "none" if left_out else "linear" if linear else "full"

    def _read_flag(self, name: str) -> bool:
        """Return a boolean field; null is false. Strings and numbers are rejected, since the
        string "false" would be truthy."""
        value = self.values.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        meant = str(value).lower() in ("true", "1", "1.0")
        self.problems.append(
            f"{self.where}.{name}={value!r:.60} must be true, false or null, without quotes. Set "
            f"it to {'true' if meant else 'false'}."
        )
        return meant

    def key_value_heads(self, sizes: BlockModelSizes) -> int | None:
        """Return the number of KV heads; None in a block without attention."""
        name, value = self._size(ATTENTION_SIZES, sizes.num_kv_heads)
        heads = sizes.num_heads
        if value is None:
            return None
        if type(value) is not int or value < 1 or heads % value:
            self.problems.append(
                f"{self.where}.{name}={value!r:.60} must be a whole number that divides the "
                f"{heads} query heads."
            )
            return 1
        return heads // value if name == ATTENTION_SIZES[0] else value

    def width(self, sizes: BlockModelSizes) -> int | None:
        """Return the intermediate size; None in a block without an MLP."""
        name, value = self._size(MLP_SIZES, sizes.ffn_hidden_size)
        if value is None:
            return None
        if name == MLP_SIZES[0]:
            return self._width_of(name, value, sizes.hidden_size)
        if type(value) is not int or value < 1:
            self.problems.append(
                f"{self.where}.{name}={value!r:.60} must be a whole number above 0."
            )
            return 1
        return int(value)

    def _width_of(self, name: str, multiplier: object, hidden_size: int) -> int:
        """Return the intermediate size for a multiplier, or 1 if the multiplier is invalid."""
        shown = f"{self.where}.{name}={multiplier!r:.60}"
        if (
            not isinstance(multiplier, int | float)
            or isinstance(multiplier, bool)
            or not 0 < multiplier <= MAX_MULTIPLIER
        ):
            self.problems.append(f"{shown} must be a number above 0 and at most {MAX_MULTIPLIER}.")
            return 1
        width = compute_ffn_size(multiplier, hidden_size)
        if width == 0:
            least = 2 / hidden_size  # 4/3 features: at least one after rounding
            self.problems.append(f"{shown} gives an MLP of size 0, expected {least:.3g} or more.")
        return width or 1

    def _size(self, names: Sequence[str], otherwise: int | None) -> tuple[str, Any]:
        """Return the name and value of the one field of `names` that is set; the value is None
        in a block without that part."""
        fixed = FIXED if names == MLP_SIZES else {}
        known = ("no_op", "replace_with_linear", *names, *fixed)
        _reject_unknown_fields(self.values, self.where, known, self.problems)
        self.problems += [
            f"{self.where}.{name}={self.values[name]!r} must be {wanted!r}."
            for name, wanted in fixed.items()
            if self.values.get(name, wanted) not in (wanted, None)
        ]
        present = [name for name in names if self.values.get(name) is not None]
        if self.part != "full":
            return names[0], None
        if len(present) > 1:
            self.problems.append(
                f"{self.where}: {' and '.join(present)}: only one of them may be set."
            )
        if not present and otherwise is None:
            self.problems.append(
                f"{self.where} has none of {', '.join(names)}, expected one, or no_op: true."
            )
        return (present[0], self.values[present[0]]) if present else (names[1], otherwise)


def _reject_unknown_fields(
    values: object, where: str, known: Sequence[str], problems: list[str]
) -> None:
    """Reject unknown fields, which may change what is computed; null and false are accepted."""
    for name, value in values.items() if isinstance(values, dict) else ():
        if name not in known and value not in (None, False):
            problems.append(
                f"{where}.{name}={value!r:.60} is an unknown field, expected null or false."
            )


def _pattern(values: Sequence[T], otherwise: T) -> tuple[T, ...]:
    """Return the shortest repeating pattern of these values; empty if all equal `otherwise`."""
    if all(value == otherwise for value in values):
        return ()
    lengths = range(1, len(values) + 1)
    period = next(
        n for n in lengths if all(value == values[i % n] for i, value in enumerate(values))
    )
    return tuple(values[:period])
