"""Rank grids: the coordinates of each rank, the process groups along axes, and the grids of a run
from its parallel degrees.

The dense grid factors the world into tp · cp · dp · pp; the expert grid factors the same ranks into
etp · ep · edp · pp, so ep is not another factor of the dense grid.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import product
from math import isqrt, lcm, prod
from typing import TypeAlias

from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.errors import PlanError
from megalith.plan.shards import EXPERT_PARTS, PARTS, key_value_ranks

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
TOKENS = "tp", "cp", "ep", "dp", "pp"

TRIED = 16
"""Number of candidate world sizes tried on either side of an invalid one."""

Fits: TypeAlias = Callable[[Mapping[str, int], int], bool]
"""Returns whether a run can have these degrees on that many ranks."""


def anything_fits(degrees: Mapping[str, int], world: int) -> bool:
    """Return True: no rules except those of the grid."""
    return True


@dataclass(frozen=True, slots=True)
class Factored:
    """An axis that is split into two: neighbors along `inner` are neighbors along `axis`."""

    axis: str
    outer: str
    inner: str


@dataclass(frozen=True, slots=True)
class Grid:
    """Ranks `offset` to `offset + world - 1` as a grid: rank = offset + sum of coordinate * stride
    over axes.

    The stride of an axis is the product of the sizes before it, so the first axis joins neighboring
    ranks.
    """

    axes: tuple[str, ...]
    """Axis names, fastest first."""

    sizes: tuple[int, ...]
    """Ranks along each axis."""

    offset: int = 0
    """First rank of the grid."""

    factored: tuple[Factored, ...] = ()
    """Axes that are split into two; their old names stand for both parts."""

    experts: "Grid | None" = None
    """The expert grid over the same ranks; its axis names can be used here, too."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return prod(self.sizes)

    @property
    def ranks(self) -> range:
        """All ranks of the grid."""
        return range(self.offset, self.offset + self.world)

    @property
    def names(self) -> tuple[str, ...]:
        """All valid axis names: the axes, then the split axes."""
        return self.axes + tuple(entry.axis for entry in self.factored)

    def size(self, axis: str) -> int:
        """Return the number of ranks along one axis."""
        return self.strides(axis)[0]

    def strides(self, axis: str) -> tuple[int, int]:
        """Return (size, stride) of one axis."""
        if self.experts is not None and self._is_expert_group((axis,)):
            return self.experts.strides(axis)
        parts = self._parts((axis,))
        first = self.axes.index(parts[0])  # the parts of a factored axis are neighbors in `axes`
        return prod(self.sizes[first : first + len(parts)]), prod(self.sizes[:first])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate on every axis; split axes also under their old name.

        Raises:
            PlanError: the rank is not part of the grid.
        """
        if rank not in self.ranks:
            raise PlanError(
                f"rank={rank} is not in this grid. Pass one of ranks {self.offset} to "
                f"{self.ranks[-1]}."
            )
        remaining, coordinates = rank - self.offset, {}
        for axis, size in zip(self.axes, self.sizes, strict=True):
            remaining, coordinates[axis] = divmod(remaining, size)
        for entry in reversed(self.factored):
            # the last first, since its axis may be part of an earlier one
            coordinates[entry.axis] = (
                coordinates[entry.outer] * self.size(entry.inner) + coordinates[entry.inner]
            )
        return coordinates if self.experts is None else self.experts.coordinates(rank) | coordinates

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at some coordinates; axes of size one may be omitted, a split axis is
        given as a whole or in parts.

        Coordinates of the expert grid follow from the others and are ignored.

        Raises:
            PlanError: an axis is unknown, missing, out of range, or given twice with different
                values.
        """
        given = {
            axis: place for axis, place in coordinates.items() if not self._is_expert_group((axis,))
        }
        problems = [self._unknown(name) for name in given if name not in self.names]
        for entry in self.factored:
            if entry.axis in given:
                whole, inner = given.pop(entry.axis), self.size(entry.inner)
                for name, value in ((entry.outer, whole // inner), (entry.inner, whole % inner)):
                    if given.setdefault(name, value) != value:
                        problems.append(
                            f"{entry.axis}={whole} means {name}={value}, but {name}={given[name]}"
                        )
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if axis not in given and size > 1:
                problems.append(f"{axis} is missing (0 to {size - 1})")
            elif not 0 <= given.get(axis, 0) < size:
                problems.append(f"{axis}={given[axis]} is not in 0 to {size - 1}")
        if problems:
            raise PlanError(
                f"coordinates={dict(coordinates)}: {'; '.join(problems)}. Pass one place on every "
                "axis."
            )
        return self.offset + sum(given.get(axis, 0) * self.strides(axis)[1] for axis in self.axes)

    def groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """Return all groups of ranks that differ along `axes` only, in ascending order; no axes:
        single ranks.

        The order of `axes` does not matter: groups are in grid order.
        """
        if self.experts is not None and self._is_expert_group(axes):
            return self.experts.groups(axes)
        inside = self._parts(axes)
        members = self._offsets(inside)
        starts = self._offsets([axis for axis in self.axes if axis not in inside])
        return [tuple(self.offset + start + member for member in members) for start in starts]

    def find_group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the group of a rank along `axes`."""
        if self.experts is not None and self._is_expert_group(axes):
            return self.experts.find_group(rank, axes)
        inside, coordinates = self._parts(axes), self.coordinates(rank)
        start = rank - sum(coordinates[axis] * self.strides(axis)[1] for axis in inside)
        return tuple(start + member for member in self._offsets(inside))

    def factor(self, *, axis: str, outer: tuple[str, int], inner: tuple[str, int]) -> "Grid":
        """Return the grid with one axis split into two; `axis` still names both parts.

        With 2 KV heads on tp = 4, neighbors hold the same head: outer ("tp_kv", 2) enumerates the
        heads and inner ("tp_copy", 2) the copies.

        Raises:
            PlanError: the axis is unknown or split already, a name is taken, or the sizes do not
                multiply to it.
        """
        if axis not in self.axes:
            raise PlanError(f"axis={axis!r} cannot be factored. Choose one of {list(self.axes)}.")
        taken = [name for name, _ in (outer, inner) if name in self.names]
        if taken or outer[0] == inner[0]:
            raise PlanError(
                f"axis={axis!r} into {outer} and {inner}: choose two names other than "
                f"{list(self.names)}."
            )
        place, size = self.axes.index(axis), self.size(axis)
        if outer[1] * inner[1] != size or outer[1] < 1:
            fits = [part for part in range(1, size + 1) if size % part == 0]
            raise PlanError(
                f"{axis}={size} is not {outer[0]} · {inner[0]} = {outer[1]} · {inner[1]}. "
                f"Choose {outer[0]} from {fits} and set {inner[0]} to {size} / {outer[0]}."
            )
        return replace(
            self,
            axes=(*self.axes[:place], inner[0], outer[0], *self.axes[place + 1 :]),
            sizes=(*self.sizes[:place], inner[1], outer[1], *self.sizes[place + 1 :]),
            factored=(*self.factored, Factored(axis, outer[0], inner[0])),
        )

    def table(self) -> str:
        """Return sizes and strides in one line, fastest axis first: `tp 2 (stride 1) · dp 4 (stride
        2)`."""
        return " · ".join(
            f"{axis} {self.size(axis)} (stride {self.strides(axis)[1]})" for axis in self.axes
        )

    def _is_expert_group(self, axes: Sequence[str]) -> bool:
        """Return whether only the expert grid has all of these axes."""
        if self.experts is None:
            return False
        return all(axis in self.experts.names for axis in axes) and not all(
            axis in self.names for axis in axes
        )

    def _parts(self, axes: Sequence[str]) -> list[str]:
        """Return the unsplit axes of some names, in grid order."""
        unknown = [name for name in axes if name not in self.names]
        if unknown:
            raise PlanError(
                f"axes={list(axes)}: {'; '.join(map(self._unknown, unknown))}. Choose from these "
                "names."
            )
        wanted = set(axes)
        for entry in self.factored:
            if entry.axis in wanted:
                wanted |= {entry.outer, entry.inner}
        return [axis for axis in self.axes if axis in wanted]

    def _offsets(self, axes: Sequence[str]) -> list[int]:
        """Return the rank offsets of the box spanned by some axes (in grid order), ascending."""
        steps = [
            range(0, size * stride, stride) for size, stride in map(self.strides, reversed(axes))
        ]
        return [sum(step) for step in product(*steps)]

    def _unknown(self, name: str) -> str:
        near = get_close_matches(name, self.names, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        return f"this grid has no axis {name!r}{meant}, only {', '.join(self.names)}"


def dense_grid(
    *,
    world: int,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    dp: int | None = None,
    order: str = DEFAULT_ORDER,
    offset: int = 0,
) -> Grid:
    """Return the grid of all but experts, with axes tp, cp, dp, pp in `order`; dp unset: world /
    (tp · cp · pp).

    Raises:
        PlanError: the degrees do not multiply to the world size, or the order is invalid; lists
            all problems.
    """
    _raise_problems(
        dense_problems(world=world, tp=tp, cp=cp, pp=pp, dp=dp, order=order), world, order
    )
    sizes = {"tp": tp, "cp": cp, "dp": world // (tp * cp * pp), "pp": pp}
    return _ordered(sizes, order, offset)


def expert_grid(
    *,
    world: int,
    etp: int = 1,
    ep: int = 1,
    pp: int = 1,
    order: str = DEFAULT_ORDER,
    offset: int = 0,
) -> Grid:
    """Return the grid of expert weights over the same ranks, with axes etp, ep, edp, pp; edp is
    world / (etp · ep · pp).

    In `order`, tp stands for etp and dp for edp.

    Raises:
        PlanError: the degrees do not divide the world size, or the order is invalid; lists all
            problems.
    """
    _raise_problems(expert_problems(world=world, etp=etp, ep=ep, pp=pp, order=order), world, order)
    sizes = {"tp": etp, "ep": ep, "dp": world // (etp * ep * pp), "pp": pp}
    grid = _ordered(sizes, order, offset)
    expert_names = {"tp": "etp", "dp": "edp"}
    return replace(grid, axes=tuple(expert_names.get(axis, axis) for axis in grid.axes))


def dense_problems(
    *,
    world: int,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    dp: int | None = None,
    order: str = DEFAULT_ORDER,
    fits: Fits = anything_fits,
) -> list[str]:
    """Return an error text for each reason why `dense_grid` cannot be built.

    `fits` checks the other rules of a run: only degrees and world sizes that it accepts are
    recommended.
    """
    problems = _degree_problems(world, {"tp": tp, "cp": cp, "pp": pp}, fits)
    if dp is not None and dp < 1:
        problems.append(
            f"parallel.dp={dp} must be at least 1. Leave it unset for world / (tp · cp · pp)."
        )
    elif dp is not None and not problems and tp * cp * pp * dp != world:
        model = tp * cp * pp
        problems.append(
            f"parallel.dp={dp}: tp · cp · pp · dp = {tp}·{cp}·{pp}·{dp} = {model * dp} is not "
            f"world_size={world}. "
            f"Use {model * dp} processes, or leave parallel.dp unset (then it is {world // model})."
        )
    return problems + order_problems(
        order, {"tp": tp, "cp": cp, "dp": dp or world // max(tp * cp * pp, 1), "pp": pp}
    )


def expert_problems(
    *, world: int, etp: int = 1, ep: int = 1, pp: int = 1, order: str = DEFAULT_ORDER
) -> list[str]:
    """Return an error text for each reason why `expert_grid` cannot be built."""
    problems = _degree_problems(world, {"etp": etp, "ep": ep, "pp": pp})
    return problems + order_problems(
        order, {"tp": etp, "ep": ep, "dp": world // max(etp * ep * pp, 1), "pp": pp}
    )


def stage_problems(dense: Grid, expert: Grid) -> list[str]:
    """Return an error with both stride tables if the grids have different pipeline groups."""
    if dense.ranks == expert.ranks and set(dense.groups(["pp"])) == set(expert.groups(["pp"])):
        return []
    return [
        "parallel.order: the dense and the expert grid have different pipeline groups over the "
        "same "
        "ranks: "
        f"dense {dense.table()}; expert {expert.table()}. Put pp last in parallel.order, or choose "
        "ep and etp so that pp has the same stride in both."
    ]


def order_problems(order: str, sizes: Mapping[str, int]) -> list[str]:
    """Return the errors of an order string for axes of these sizes (by token: tp, cp, ep, dp,
    pp)."""
    tokens = order.lower().split("-")
    unknown = sorted({token for token in tokens if token and token not in TOKENS})
    twice = sorted({token for token in tokens if token in TOKENS and tokens.count(token) > 1})
    missing = [axis for axis, size in sizes.items() if size > 1 and axis not in tokens]
    hint = (
        f"Use each of {', '.join(TOKENS)} at most once, fastest first, joined by '-', as in "
        f"{DEFAULT_ORDER}."
    )
    problems = []
    if unknown:
        problems.append(
            f"parallel.order={order}: unknown axis {', '.join(map(repr, unknown))}. {hint}"
        )
    if twice:
        problems.append(f"parallel.order={order}: {', '.join(twice)} occurs more than once. {hint}")
    if "" in tokens:
        problems.append(f"parallel.order={order!r}: an axis name is empty. {hint}")
    for axis in missing:
        problems.append(
            f"parallel.order={order} has no {axis}, whose size is {sizes[axis]}. Add {axis} to it."
        )
    return problems


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order; of huge numbers, the small divisors and their
    cofactors only.

    The limit keeps rules fast for mistyped numbers.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, min(isqrt(max(number, 0)), 100_000) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _ordered(sizes: Mapping[str, int], order: str, offset: int) -> Grid:
    """Return the grid with the axes in the order of a valid order string; omitted axes (size one)
    come last."""
    named = [token for token in order.lower().split("-") if token in sizes]
    axes = *named, *(axis for axis in sizes if axis not in named)
    return Grid(axes=axes, sizes=tuple(sizes[axis] for axis in axes), offset=offset)


def _degree_problems(
    world: int, degrees: Mapping[str, int], fits: Fits = anything_fits
) -> list[str]:
    """Return errors for degrees below one, or whose product does not divide the world size, with
    valid values."""
    problems = [
        f"parallel.{axis}={size} must be at least 1." for axis, size in degrees.items() if size < 1
    ]
    if world < 1:
        problems.append(
            f"world_size={world} must be at least 1. Use as many processes as the degrees multiply "
            "to."
        )
    if problems:
        return problems
    model = prod(degrees.values())
    if world % model == 0:
        return []
    fixes = _axis_fixes(world, degrees, fits)
    processes = _near_worlds(world, degrees, fits)
    if processes or not fixes:
        below = world // model * model
        processes = processes or ([below, below + model] if below else [model])
        fixes = [f"use {' or '.join(map(str, processes))} processes", *fixes]
    if len(fixes) == 1:  # no single change is enough
        fixes.append(f"choose {', '.join(degrees)} so that they multiply to a divisor of {world}")
    names, values = (
        " · ".join(f"parallel.{axis}" for axis in degrees),
        "·".join(map(str, degrees.values())),
    )
    return [
        f"world_size={world} is not {names} = {values} times an integer: {', or '.join(fixes)}."
    ]


def _axis_fixes(world: int, degrees: Mapping[str, int], fits: Fits) -> list[str]:
    """Return changes of one degree that make the product divide the world size."""
    model, fixes = prod(degrees.values()), []
    for axis, size in degrees.items():
        rest = model // size
        if size > 1 and world % rest == 0:
            valid_degrees = [
                degree
                for degree in divisors(world // rest)
                if fits({**degrees, axis: degree}, world)
            ]
            fixes += (
                [
                    f"set parallel.{axis} to "
                    f"{f'one of {valid_degrees}' if valid_degrees[1:] else valid_degrees[0]}"
                ]
                if valid_degrees
                else []
            )
    return fixes


def _near_worlds(world: int, degrees: Mapping[str, int], fits: Fits) -> list[int]:
    """Return the next smaller and the next larger valid world size."""
    model = prod(degrees.values())
    below = world // model * model
    sides = range(below, 0, -model), range(below + model, below + (TRIED + 1) * model, model)
    nearest = [
        next((ranks for ranks in side[:TRIED] if fits(degrees, ranks)), None) for side in sides
    ]
    return [ranks for ranks in nearest if ranks is not None]


def _raise_problems(problems: Sequence[str], world: int, order: str) -> None:
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise PlanError(
            f"{world} ranks cannot be laid out in order {order}. Use other settings:\n{lines}"
        )


# --- rank grids of a run, from its parallel degrees; dp, cp and tp are each two axes


def model_grid(
    parallel: ParallelConfig, model: ModelConfig, world: int, *, offset: int = 0
) -> Grid:
    """Return the dense grid of a run, with tp, cp and dp each split into two axes (`DENSE_AXES`).

    Raises:
        PlanError: the degrees do not multiply to the world size.
    """
    p = parallel
    grid = dense_grid(world=world, tp=p.tp, cp=p.cp, pp=p.pp, dp=p.dp, order=p.order, offset=offset)
    heads = key_value_ranks(model.num_kv_heads, p.tp)
    a2a = {"a2a": p.cp, "a2a+ring": p.context.a2a or 1}.get(p.context.kind, 1) if p.cp > 1 else 1
    inner = {"tp": p.tp // heads, "cp": a2a, "dp": grid.size("dp") // p.dp_replicate}
    for axis, size in inner.items():
        outer_name, inner_name = PARTS[axis]
        grid = grid.factor(
            axis=axis, outer=(outer_name, grid.size(axis) // size), inner=(inner_name, size)
        )
    return (
        grid
        if model.moe is None
        else replace(grid, experts=build_expert_grid(parallel, world, offset=offset))
    )


def build_expert_grid(parallel: ParallelConfig, world: int, *, offset: int = 0) -> Grid:
    """Return the grid of the expert layers over the same ranks, with edp split into two axes.

    Raises:
        PlanError: ep, etp and pp do not divide the world size.
    """
    p = parallel
    etp = p.tp if p.etp is None else p.etp
    grid = expert_grid(world=world, etp=etp, ep=p.ep, pp=p.pp, order=p.order, offset=offset)
    replica, shard = EXPERT_PARTS["edp"]
    return grid.factor(
        axis="edp",
        outer=(replica, p.dp_replicate),
        inner=(shard, grid.size("edp") // p.dp_replicate),
    )


def min_world_size(parallel: ParallelConfig) -> int:
    """Return the smallest world size of a layout; 1 if a degree is not positive, which the config
    rules report.

    All experts are held by ep · etp ranks of each stage; with ep=1 and etp unset the dense degrees
    decide.
    """
    p = parallel
    dense = p.tp * p.cp * p.pp * (p.dp if p.dp is not None else max(p.dp_replicate, 1))
    experts = p.ep * (p.tp if p.etp is None else p.etp) * p.pp * max(p.dp_replicate, 1)
    return max(
        1, dense if p.dp is not None or (p.ep == 1 and p.etp is None) else lcm(dense, experts)
    )
