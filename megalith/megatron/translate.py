"""Megatron's arguments to a run of ours, with a word on every argument that was given or
assumed."""

from collections.abc import Sequence
from dataclasses import dataclass

from megalith.config.fields import Plain
from megalith.config.tokenizer import TokenizerConfig
from megalith.config.train import TrainRun
from megalith.config.tree import from_dict
from megalith.megatron.arguments import Arguments, read_arguments
from megalith.megatron.data import tokenizer_settings, translate_data
from megalith.megatron.draft import Draft, FlagReport, judge_unmapped, mention_the_rest
from megalith.megatron.experts import translate_trace
from megalith.megatron.layout import data_parallel_ranks, ranks_of, translate_layout
from megalith.megatron.memory import translate_memory
from megalith.megatron.model import translate_model
from megalith.megatron.optimizer import translate_optimizer
from megalith.megatron.schedule import translate_schedule
from megalith.megatron.steps import translate_folders, translate_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A run of ours, or why there is none."""

    run: TrainRun | None
    """The run, also when arguments were left out of it; None when it cannot be written at all."""

    entries: tuple[FlagReport, ...]
    """What became of each argument."""

    problems: tuple[str, ...]
    """Why there is no run."""

    ranks: int
    """Ranks on which the run has Megatron's data-parallel ranks; as few as can be when their number
    is not known."""

    def refusals(self, *, strict: bool) -> list[str]:
        """Why the run must not be used: it cannot be written, would be another model, or (`strict`)
        other numbers."""
        effects = ("model", "numbers") if strict else ("model",)
        return [
            *self.problems,
            *(f"{entry.flag}: {entry.text}." for entry in self.entries if entry.effect in effects),
        ]


def translate(
    words: Sequence[str], *, name: str, world: int | None = None, tokenizer_vocab: int | None = None
) -> Translation:
    """A list of Megatron's arguments as a run called `name`.

    world: ranks of the job, where known; tokenizer_vocab: ids of the tokenizer that the arguments
    name, where known. Raises nothing: what cannot be read or is missing is in `problems`, all of
    it.
    """
    draft = Draft(read_arguments(words))
    dp = data_parallel_ranks(draft, world)
    translate_model(draft)
    translate_data(draft, tokenizer_vocab)
    translate_steps(draft, dp)
    translate_trace(draft)
    translate_schedule(draft)
    translate_optimizer(draft)
    translate_layout(draft)
    translate_memory(draft)
    translate_folders(draft)
    judge_unmapped(draft)
    mention_the_rest(draft)
    problems = (*draft.arguments.problems, *draft.problems)
    return Translation(
        run=None if problems else from_dict(TrainRun, _nested({"name": name, **draft.settings})),
        entries=tuple(draft.entries),
        problems=problems,
        ranks=ranks_of(draft, dp),
    )


def named_tokenizer(words: Sequence[str]) -> TokenizerConfig | None:
    """The tokenizer whose size the translation needs: named by the arguments, and its size is
    not."""
    arguments: Arguments = read_arguments(words)
    settings = {name: value for name, (_, value) in tokenizer_settings(arguments).items()}
    if not isinstance(settings.get("path"), str) or arguments.given("--vocab-size"):
        return None
    return from_dict(TokenizerConfig, settings)


def _nested(settings: dict[str, Plain]) -> dict[str, Plain]:
    """Dotted names as nested mappings."""
    tree: dict[str, Plain] = {}
    for path, value in settings.items():
        *sections, leaf = path.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return tree
