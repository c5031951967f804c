"""Translate the arguments of Megatron's text generation servers to a `megalith serve` command."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from megalith.config.server import ServeRun, serve_problems
from megalith.config.tree import apply_overrides
from megalith.errors import ConfigError
from megalith.megatron.parse import (
    Draft,
    FlagReport,
    list_refused,
    mapped_flags,
    parse_arguments,
    report_unmapped,
)

_SERVING_PROGRAM = re.compile("inference|text_generation")

OPTIONS = ("template", "dtype", "nproc")
"""Options of `megalith serve` that are no settings of `ServeRun`."""

_UNSUPPORTED_SIZES = (
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
)
SPECULATIVE_TOKENS = "--num-speculative-tokens"
"""Draft tokens, which Megatron takes from the MTP layers of the model."""

GRAPH_IMPL = "--cuda-graph-impl"
"""Whether parts of the model are captured in CUDA graphs."""
GRAPH_MAX_TOKENS = (
    "--inference-dynamic-batching-cuda-graph-max-tokens",
    "--inference-cuda-graph-max-tokens",
)
"""Largest number of tokens of a graph of steps with prompts, under both of its names."""

_CONVERSIONS: Mapping[str, Mapping[str, str]] = {
    "--engine-type": {"static": "static", "dynamic": "continuous"},
    "--inference-cuda-graph-scope": {"none": "none", "layer": "auto", "block": "auto"},
    "--decode-only-cuda-graphs": {"True": "none"},
    "--inference-cuda-graph-all-prefills": {"True": "all"},
    "--use-legacy-static-engine": {"True": "static"},
    "--inference-disable-triton-nvls-kernels": {"True": "process_group"},
}
"""Values of settings, by the values of flags that are not copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeTranslation:
    """A `megalith serve` command, or the reasons why there is none."""

    command: tuple[str, ...]
    """Words of the command; `SOURCE` stands for a model that the arguments do not name."""

    run: ServeRun | None
    """Its settings; None: there is no command."""

    entries: tuple[FlagReport, ...]
    """Report on each argument."""

    problems: tuple[str, ...]
    """Why there is no command."""

    def refusals(self, *, strict: bool) -> list[str]:
        """Return why the command must not be used: it cannot be written, would serve another model,
        or (`strict`) would compute in another precision."""
        return [*self.problems, *list_refused(self.entries, strict=strict)]


def is_serving_program(program: str | None) -> bool:
    """Return whether a Python file of Megatron serves or generates text.

    >>> is_serving_program("tools/run_text_generation_server.py"), is_serving_program("train.py")
    (True, False)
    """
    return program is not None and bool(_SERVING_PROGRAM.search(PurePath(program).name))


def translate_serving(words: Sequence[str]) -> ServeTranslation:
    """Translate the arguments of a text generation server of Megatron.

    Arguments that are left out have the defaults of `megalith serve`, which differ in speed,
    memory, context length and listening address. Raises nothing: all messages are in `problems`.
    """
    draft = Draft(parse_arguments(words, "serve"))
    source = _translate_shared(draft)
    for name, flag in mapped_flags("serve").items():
        if draft.arguments.given(name) and name in draft.arguments.values:
            _translate_mapped(draft, name, flag.setting[0])
    _report_rest(draft)
    problems = [*draft.arguments.problems, *draft.problems]
    run = None if problems else _build_run(draft, problems)
    options = [
        word
        for setting, value in draft.settings.items()
        for word in (_spell_option(setting), _spell_value(value))
    ]
    return ServeTranslation(
        command=() if problems else ("megalith", "serve", source, *options),
        run=run,
        entries=tuple(draft.entries),
        problems=tuple(problems),
    )


def format_command(command: Sequence[str]) -> str:
    """Return a command as a line for a shell; variables that the script left unset stay."""
    return " ".join(word if "${" in word else shlex.quote(word) for word in command)


def _translate_shared(draft: Draft) -> str:
    """Translate the flags that training reads, too; return the model to serve."""
    words = draft.arguments.words
    source = "SOURCE"
    if words.get("--load"):
        source = words["--load"][0]
        text = "a checkpoint of Megatron is read as it is"
        draft.entries.append(
            FlagReport(
                verdict="mapped", flag=f"--load {source}", text=text, setting="source", value=source
            )
        )
    if words.get("--seed"):
        draft.put("--seed", "engine.seed", words["--seed"][0])
    if draft.arguments.given("--bf16"):
        draft.put("--bf16", "dtype", "bf16")
    if draft.arguments.given("--fp16"):
        text = "not implemented: inference in fp16; use --dtype bf16 or fp32"
        draft.report("not mapped", "--fp16", text, "numbers")
    tp = "--tensor-model-parallel-size"
    if words.get(tp, ("1",)) not in ((), ("1",)):
        draft.put(tp, "nproc", words[tp][0])
    _translate_graph_impl(draft)
    for flag in _UNSUPPORTED_SIZES:
        if words.get(flag, ("1",)) != ("1",):
            text = (
                "not implemented: a server with this parallel layout; --nproc N distributes the "
                "model over N processes (tensor and expert parallel) with the same results"
            )
            draft.report("not mapped", flag, text)
    return source


def _translate_graph_impl(draft: Draft) -> None:
    """Translate whether steps are captured in CUDA graphs."""
    words = draft.arguments.words.get(GRAPH_IMPL, ())
    impl = words[0] if words else None
    if impl == "none":
        draft.put(GRAPH_IMPL, "engine.graphs.mode", "none")
    elif impl == "local":
        draft.report("already", GRAPH_IMPL, "engine.graphs.mode=auto uses CUDA graphs on GPUs")


def _translate_mapped(draft: Draft, name: str, setting: str) -> None:
    """Set the setting of a given flag; of several flags with the same setting, the first of the
    table applies."""
    value = draft.arguments.value(name)
    if setting in draft.settings:
        draft.report("already", name, f"{setting} is determined by another argument")
        return
    if name == SPECULATIVE_TOKENS:
        if value == 0:
            draft.report("already", name, "no draft tokens")
            return
        draft.put(name, "engine.speculation.method", "mtp")
    if setting == "engine.graphs.num_buckets" and value == -1:
        draft.report("already", name, "as many buckets as needed are the default")
        return
    if name in GRAPH_MAX_TOKENS:
        if draft.settings.get("engine.graphs.prefills", "mixed") != "mixed":
            draft.report("already", name, "engine.graphs.prefills is set by another argument")
            return
        draft.put(name, "engine.graphs.prefills", "mixed")
    if name.startswith("--no-"):
        value = False
    draft.put(name, setting, _CONVERSIONS.get(name, {}).get(str(value), value))


def _report_rest(draft: Draft) -> None:
    """Report on every given flag without a report."""
    translated = list(draft.entries)
    report_unmapped(draft)
    reported = {entry.flag.split()[0] for entry in translated}
    rest = [
        entry for entry in draft.entries[len(translated) :] if entry.flag.split()[0] not in reported
    ]
    draft.entries[:] = [*translated, *rest]


def _build_run(draft: Draft, problems: list[str]) -> ServeRun | None:
    """Return the settings of the command; messages about invalid ones are added to `problems`."""
    settings = {
        name: _spell_value(value) for name, value in draft.settings.items() if name not in OPTIONS
    }
    try:
        run = apply_overrides(ServeRun(), settings)
    except ConfigError as error:
        problems.append(str(error))
        return None
    problems += serve_problems(run)
    return None if problems else run


def _spell_option(setting: str) -> str:
    """Return the option of `megalith serve` that sets a setting.

    >>> _spell_option("engine.max_num_seqs"), _spell_option("server.port")
    ('--engine.max_num_seqs', '--port')
    """
    return "--" + setting.removeprefix("server.")


def _spell_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
