"""Layers as Nemotron's search for architectures writes them down, `block_configs`: read into ours,
never changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megalith.config.layers import LayersConfig, Part

ATTENTION_SIZES = ("n_heads_in_group", "num_query_groups", "num_key_value_heads")
"""Spellings of how many key/value heads a layer has: the first counts the query heads that share
one."""

MLP_SIZES = ("ffn_mult", "ffn_hidden_size", "intermediate_size")
"""Spellings of how wide an MLP is: the first in parts of 2/3 of the hidden size."""

FIXED: Mapping[str, object] = {"gated": True, "hidden_act": "silu"}
"""What an MLP has, where it is said."""

WIDTHS = 256
"""Widths that follow from a multiplier are rounded up to a multiple of this."""

MOST = 1_000_000
"""The largest multiplier. T5 11B, the widest that we know, has 96 (arXiv:1910.10683); this is a
guess far above."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBlocks:
    """What a list of blocks says of a model."""

    layers: LayersConfig
    """As patterns over the layers."""

    num_kv_heads: int
    """The most of any layer."""

    ffn_hidden_size: int
    """The widest of any layer."""

    problems: tuple[str, ...] = ()
    """Everything that is wrong with the list; the rest is not to be used then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The model that blocks belong to."""

    num_layers: int
    num_heads: int
    hidden_size: int
    num_kv_heads: int | None = None
    """Of blocks with attention that do not say how many; unset: they must."""

    ffn_hidden_size: int | None = None
    """The same of MLPs."""


def read_blocks(entries: object, sizes: Sizes) -> LayerBlocks:
    """A parsed list of blocks -> layers. `sizes`: of the whole model.

    Source: Bercovich et al. 2024, arXiv:2411.19146 (Puzzle).
    """
    if not isinstance(entries, list) or len(entries) != sizes.num_layers:
        found = f"{len(entries)} entries" if isinstance(entries, list) else f"{entries!r:.60}"
        text = (
            f"block_configs has {found}, expected a list with one for each of "
            f"{sizes.num_layers} layers."
        )
        return LayerBlocks(
            layers=LayersConfig(), num_kv_heads=1, ffn_hidden_size=1, problems=(text,)
        )
    problems: list[str] = []
    heads = [
        _Half(entry, f"block_configs[{n}]", ("attention",), problems)
        for n, entry in enumerate(entries)
    ]
    mlps = [
        _Half(entry, f"block_configs[{n}]", ("mlp", "ffn"), problems)
        for n, entry in enumerate(entries)
    ]
    keys = [half.key_value_heads(sizes) for half in heads]
    widths = [half.width(sizes) for half in mlps]
    for n, entry in enumerate(entries):
        _refuse_others(entry, f"block_configs[{n}]", ("attention", "mlp", "ffn"), problems)
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


def width_of(multiplier: float, hidden_size: int) -> int:
    """Features inside an MLP of this multiplier, which is at most `MOST`.

    >>> width_of(2.625, 8192), width_of(1.3125, 4096)
    (14336, 3584)
    """
    return -(-int(2 * multiplier * hidden_size / 3) // WIDTHS) * WIDTHS


def multiplier_of(width: int, hidden_size: int) -> float | None:
    """A multiplier of this width; None where no multiplier has it.

    >>> multiplier_of(14336, 8192), multiplier_of(100, 8192)
    (2.625, None)
    """
    found = 3 * width / (2 * hidden_size)
    return found if found <= MOST and width_of(found, hidden_size) == width else None


class _Half:
    """What a block says of attention or of the MLP; what is wrong with it is added to
    `problems`."""

    def __init__(
        self, entry: object, where: str, names: Sequence[str], problems: list[str]
    ) -> None:
        self.problems, given = (
            problems,
            [name for name in names if isinstance(entry, dict) and name in entry],
        )
        self.where = f"{where}.{given[0] if given else names[-1]}"
        found = entry[given[0]] if isinstance(entry, dict) and len(given) == 1 else None
        if not isinstance(found, dict):
            shown = " and ".join(given) if len(given) > 1 else repr(found)[:60]
            problems.append(f"{where}: {shown}: expected an object for {' or '.join(names)}.")
        self.values: Mapping[str, Any] = found if isinstance(found, dict) else {"no_op": True}
        self.part = self._part()

    def _part(self) -> Part:
        left_out, linear = self._yes("no_op"), self._yes("replace_with_linear")
        if left_out and linear:
            self.problems.append(
                f"{self.where}: no_op and replace_with_linear: it must be one of the two, or "
                "neither."
            )
        return "none" if left_out else "linear" if linear else "full"

    def _yes(self, name: str) -> bool:
        """A switch; null is off. Words and numbers are refused: the word "false" would be as good
        as true."""
        value = self.values.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        meant = str(value).lower() in ("true", "1", "1.0")
        self.problems.append(
            f"{self.where}.{name}={value!r:.60} must be true, false or null, without quotes. Set "
            f"it to {'true' if meant else 'false'}."
        )
        return meant

    def key_value_heads(self, sizes: Sizes) -> int | None:
        """Of a block with attention; None where there is none."""
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

    def width(self, sizes: Sizes) -> int | None:
        """Of a block with an MLP; None where there is none."""
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
        """1 where the multiplier is none, too large to compute with, or so small that nothing is
        left."""
        shown = f"{self.where}.{name}={multiplier!r:.60}"
        if (
            not isinstance(multiplier, int | float)
            or isinstance(multiplier, bool)
            or not 0 < multiplier <= MOST
        ):
            self.problems.append(f"{shown} must be a number above 0 and at most {MOST}.")
            return 1
        width = width_of(multiplier, hidden_size)
        if width == 0:
            least = 2 / hidden_size  # 4/3 of a feature: enough for one, also after rounding
            self.problems.append(
                f"{shown} makes an MLP of no features, expected {least:.3g} or more."
            )
        return width or 1

    def _size(self, names: Sequence[str], otherwise: int | None) -> tuple[str, Any]:
        """The one of several fields that has a value, and it; None in a block without that part."""
        fixed = FIXED if names == MLP_SIZES else {}
        known = ("no_op", "replace_with_linear", *names, *fixed)
        _refuse_others(self.values, self.where, known, self.problems)
        self.problems += [
            f"{self.where}.{name}={self.values[name]!r} must be {wanted!r}."
            for name, wanted in fixed.items()
            if self.values.get(name, wanted) not in (wanted, None)
        ]
        said = [name for name in names if self.values.get(name) is not None]
        if self.part != "full":
            return names[0], None
        if len(said) > 1:
            self.problems.append(f"{self.where}: {' and '.join(said)}: it must be one of them.")
        if not said and otherwise is None:
            self.problems.append(
                f"{self.where} has none of {', '.join(names)}, expected one, or no_op: true."
            )
        return (said[0], self.values[said[0]]) if said else (names[1], otherwise)


def _refuse_others(values: object, where: str, known: Sequence[str], problems: list[str]) -> None:
    """Fields that nobody knows may change what is computed; null and false ask for nothing."""
    for name, value in values.items() if isinstance(values, dict) else ():
        if name not in known and value not in (None, False):
            problems.append(f"{where}.{name}={value!r:.60} is not known, expected null or false.")


def _pattern(values: Sequence[T], otherwise: T) -> tuple[T, ...]:
    """The shortest pattern that repeats to these; none where all are as the model says."""
    if all(value == otherwise for value in values):
        return ()
    lengths = range(1, len(values) + 1)
    found = next(
        n for n in lengths if all(one == values[place % n] for place, one in enumerate(values))
    )
    return tuple(values[:found])
