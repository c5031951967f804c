"""`megalith routing`: what a run's routing trace tells of its experts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tyro.conf import Positional

from megalith.cli.arguments import parse_options
from megalith.cli.evaluate import find_run
from megalith.cli.output import print_json
from megalith.errors import ConfigError
from megalith.observe.routing import ExpertLoad, RoutingPredictability, study_trace

if TYPE_CHECKING:  # it loads torch
    from megalith.train.foresight import Applied


@dataclass(frozen=True, kw_only=True)
class RoutingCommand:
    """How choices of experts concentrate, and how far a layer's tell those of the next: from
    observe.routing_trace.

    Draws plots/routing.png.
    """

    run: Positional[str]
    """Folder of a run: a path, or its name under runs/."""

    json: bool = False
    """Print one JSON document."""


def main(argv: list[str]) -> int:
    """Run the command."""
    command = parse_options(RoutingCommand, argv, prog="megalith routing")
    from megalith.observe.plots import plot_routing
    from megalith.recipes import resolve

    folder = find_run(command.run)
    moe = resolve(str(folder)).model.moe
    if moe is None:
        raise ConfigError(
            f"{folder} has model.moe=null: no token chooses among experts. ExpertLoad a run with "
            "model.moe."
        )
    uses, pairs = study_trace(folder / "routing", experts=moe.num_experts)
    from megalith.train.foresight import apply_routers

    applied = apply_routers(folder / "routing", moe)
    plot = plot_routing(folder, uses, pairs, {(one.layer, one.router): one.hits for one in applied})
    if command.json:
        print_json(
            {
                "run": str(folder),
                "plot": str(plot),
                "layers": [
                    asdict(use) | {"load": use.load, "entropy": use.entropy, "half": use.half}
                    for use in uses
                ],
                "pairs": [asdict(pair) for pair in pairs],
                "routers": [asdict(one) for one in applied],
            }
        )
    else:
        print(
            "\n".join(
                [
                    *use_lines(uses),
                    "",
                    *predictability_lines(pairs),
                    *router_lines(applied),
                    f"drew {plot}",
                ]
            )
        )
    return 0


def use_lines(uses: Sequence[ExpertLoad]) -> list[str]:
    """A table of how choices concentrate: the busiest experts, their load, the entropy, and who has
    half."""
    rows = [f"{'layer':<14}{'tokens':>10}{'load':>8}{'entropy':>9}{'half':>6}  busiest"]
    for use in uses:
        best = sorted(range(len(use.shares)), key=lambda expert: (-use.shares[expert], expert))[:3]
        busiest = ", ".join(f"{expert} {use.shares[expert]:.1%}" for expert in best)
        rows.append(
            f"{use.layer:<14}{use.tokens:>10,}{use.load:>8.2f}{use.entropy:>9.3f}{use.half:>6}  "
            f"{busiest}"
        )
    return [
        *rows,
        "load: of the busiest, mean 1; entropy: 1 when all are equally busy; half: experts with "
        "half of it",
    ]


def predictability_lines(pairs: Sequence[RoutingPredictability]) -> list[str]:
    """A table of how far the choices of a layer tell those of the next."""
    if not pairs:
        return []
    rows = [
        f"{'from layer':<14}{'to':<14}{'known':>7}{'best':>8}{'blind':>8}{'all k':>8}{'blind':>8}"
    ]
    rows += [
        f"{pair.layer:<14}{pair.following:<14}{pair.information:>7.3f}{pair.first:>8.1%}{pair.first_blind:>8.1%}"
        f"{pair.all:>8.1%}{pair.all_blind:>8.1%}"
        for pair in pairs
    ]
    return [
        *rows,
        "known: of the information in the best choice; best, all k: share guessed by counts of "
        "other tokens,",
        "blind: without knowing the choices before",
        "",
    ]


def router_lines(applied: Sequence["Applied"]) -> list[str]:
    """A table of what routers find in hidden states, of their own layer and of the one before."""
    if not applied:
        return ["routers: not there (observe.routing_captures hidden routers)", ""]
    rows = [f"{'hidden of':<14}{'router of':<14}{'finds':>7}{'load':>8}"]
    rows += [f"{one.layer:<14}{one.router:<14}{one.hits:>7.1%}{one.load:>8.3f}" for one in applied]
    return [
        *rows,
        "finds: share of tokens' k choices; load: cosine of how busy experts are by it, and are",
        "",
    ]
