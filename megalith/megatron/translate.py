"""Translate Megatron's arguments to a run, with a report on every argument that is given or
assumed."""

from collections.abc import Sequence
from dataclasses import dataclass

from megalith.config.data import TokenizerConfig
from megalith.config.fields import Plain
from megalith.config.train import TrainRun
from megalith.config.tree import from_dict
from megalith.megatron.data import read_tokenizer_settings, translate_data
from megalith.megatron.layers import translate_routing_trace
from megalith.megatron.layout import (
    find_dp_size,
    find_world_size,
    translate_layout,
    translate_memory,
)
from megalith.megatron.model import translate_model
from megalith.megatron.parse import (
    Draft,
    FlagReport,
    list_refused,
    parse_arguments,
    report_unmapped,
    report_unused,
)
from megalith.megatron.training import (
    translate_folders,
    translate_logging,
    translate_measurements,
    translate_optimizer,
    translate_schedule,
    translate_steps,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A run, or the reasons why there is none."""

    run: TrainRun | None
    """The run, also if arguments are not mapped; None if it cannot be written at all."""

    entries: tuple[FlagReport, ...]
    """Report on each argument."""

    problems: tuple[str, ...]
    """Why the run cannot be written."""

    ranks: int
    """World size with Megatron's data-parallel size; as small as possible if that is unknown."""

    def refusals(self, *, strict: bool) -> list[str]:
        """Return why the run must not be used: it cannot be written, would train another model, or
        (`strict`) would have other losses."""
        return [*self.problems, *list_refused(self.entries, strict=strict)]


def translate(
    words: Sequence[str], *, name: str, world: int | None = None, tokenizer_vocab: int | None = None
) -> Translation:
    """Translate Megatron's arguments to a run called `name`.

    world: world size of the job, if known; tokenizer_vocab: vocabulary size of the tokenizer that
    the arguments name, if known. Raises nothing: all messages are in `problems`.
    """
    draft = Draft(parse_arguments(words))
    dp = find_dp_size(draft, world)
    translate_model(draft)
    translate_data(draft, tokenizer_vocab)
    translate_steps(draft, dp)
    translate_routing_trace(draft)
    translate_schedule(draft)
    translate_optimizer(draft)
    translate_layout(draft)
    translate_memory(draft)
    translate_folders(draft)
    translate_logging(draft)
    translate_measurements(draft)
    report_unmapped(draft)
    report_unused(draft)
    problems = (*draft.arguments.problems, *draft.problems)
    return Translation(
        run=None if problems else from_dict(TrainRun, _nested({"name": name, **draft.settings})),
        entries=tuple(draft.entries),
        problems=problems,
        ranks=find_world_size(draft, dp),
    )


def named_tokenizer(words: Sequence[str]) -> TokenizerConfig | None:
    """Return the tokenizer whose vocabulary size the translation needs; None if the arguments do
    not name a tokenizer, or also contain the size."""
    arguments = parse_arguments(words)
    settings = {name: value for name, (_, value) in read_tokenizer_settings(arguments).items()}
    if not isinstance(settings.get("path"), str) or arguments.given("--vocab-size"):
        return None
    return from_dict(TokenizerConfig, settings)


def _nested(settings: dict[str, Plain]) -> dict[str, Plain]:
    """Return nested mappings from dotted names."""
    tree: dict[str, Plain] = {}
    for path, value in settings.items():
        *sections, leaf = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    return tree
