"""`megalith routing`: expert load and cross-layer routing predictability from a run's routing
trace."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tyro.conf import Positional

from megalith.cli.arguments import parse_options
from megalith.cli.evaluate import find_run
from megalith.cli.output import print_json
from megalith.errors import ConfigError
from megalith.observe.routing import ExpertLoad, RoutingPredictability, analyze_trace

if TYPE_CHECKING:  # imports torch
    from megalith.train.routing_predictability import RouterPrediction


@dataclass(frozen=True, kw_only=True)
class RoutingCommand:
    """Show how tokens are distributed over experts, and how well a layer's routing predicts that of
    the next layer.

    Needs a run with observe.routing_trace; draws plots/routing.png.
    """

    run: Positional[str]
    """Folder of a run: a path, or its name under runs/."""

    json: bool = False
    """Print one JSON document."""


def main(argv: list[str]) -> int:
    """Run the command."""
    command = parse_options(RoutingCommand, argv, prog="megalith routing")
    from megalith.observe.routing import plot_routing
    from megalith.recipes import resolve

    folder = find_run(command.run)
    moe = resolve(str(folder)).model.moe
    if moe is None:
        raise ConfigError(
            f"{folder} has model.moe=null, so it has no experts. Use a run with model.moe."
        )
    loads, pairs = analyze_trace(folder / "routing", experts=moe.num_experts)
    from megalith.train.routing_predictability import apply_routers

    applied = apply_routers(folder / "routing", moe)
    plot = plot_routing(
        folder, loads, pairs, {(one.layer, one.router): one.hits for one in applied}
    )
    if command.json:
        print_json(
            {
                "run": str(folder),
                "plot": str(plot),
                "layers": [
                    asdict(load) | {"load": load.load, "entropy": load.entropy, "half": load.half}
                    for load in loads
                ],
                "pairs": [asdict(pair) for pair in pairs],
                "routers": [asdict(one) for one in applied],
            }
        )
    else:
        print(
            "\n".join(
                [
                    *format_expert_load(loads),
                    "",
                    *format_predictability(pairs),
                    *format_router_predictions(applied),
                    f"drew {plot}",
                ]
            )
        )
    return 0


def format_expert_load(loads: Sequence[ExpertLoad]) -> list[str]:
    """Format a table of expert load: the busiest experts, their load, the entropy, and the
    number of experts with half of the tokens."""
    rows = [f"{'layer':<14}{'tokens':>10}{'load':>8}{'entropy':>9}{'half':>6}  busiest"]
    for load in loads:
        best = sorted(range(len(load.shares)), key=lambda expert: (-load.shares[expert], expert))[
            :3
        ]
        busiest = ", ".join(f"{expert} {load.shares[expert]:.1%}" for expert in best)
        rows.append(
            f"{load.layer:<14}{load.tokens:>10,}{load.load:>8.2f}{load.entropy:>9.3f}"
            f"{load.half:>6}  "
            f"{busiest}"
        )
    return [
        *rows,
        "load: load of the busiest expert (mean 1); entropy: 1 for a balanced load; half: number "
        "of "
        "experts with half of the tokens",
    ]


def format_predictability(pairs: Sequence[RoutingPredictability]) -> list[str]:
    """Format a table of how well a layer's routing predicts that of the next layer."""
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
        "known: mutual information / entropy of the top expert; best, all k: accuracy of "
        "predictions from other tokens;",
        "blind: the same without the previous layer's experts",
        "",
    ]


def format_router_predictions(applied: Sequence["RouterPrediction"]) -> list[str]:
    """Format a table of routers applied to the hidden states of their own and the previous
    layer."""
    if not applied:
        return ["routers: not captured (set observe.routing_captures to hidden routers)", ""]
    rows = [f"{'hidden of':<14}{'router of':<14}{'finds':>7}{'load':>8}"]
    rows += [f"{one.layer:<14}{one.router:<14}{one.hits:>7.1%}{one.load:>8.3f}" for one in applied]
    return [
        *rows,
        "finds: share of the selected experts; load: cosine similarity of predicted and actual "
        "load",
        "",
    ]
