"""`megalith data pack`: pack conversations into rows and report the fill rate."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tyro.conf import Positional

from megalith.cli.arguments import parse_options, split_overrides
from megalith.cli.output import print_json
from megalith.config.train import TrainRun
from megalith.data.packs import PackReport, pack_first_fit, summarize_packing, write_packs
from megalith.data.sample import SampleSettings
from megalith.data.sft import build_conversations
from megalith.data.tokenizer import build_tokenizer
from megalith.errors import raise_all
from megalith.recipes import resolve_run

WIDTH = 40
"""Length of the longest bar in characters."""


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """Pack a run's conversations into rows with first-fit decreasing; the run's seed orders
    conversations of equal length. Training reads the result with --data.sft.packs OUTPUT."""

    recipe: Positional[str]
    """Name of a recipe, a YAML file, or the folder of a run that reads conversations (data.sft)."""

    output: str
    """File to write."""

    overwrite: bool = False
    """Overwrite an existing file."""

    json: bool = False
    """Print one JSON document about the result."""


def pack(argv: list[str]) -> int:
    """Run `megalith data pack RECIPE --output FILE`.

    Raises:
        ConfigError: the run reads no conversations, or the file already exists.
        DataError: conversations cannot be read, or the file cannot be written.
    """
    rest, overrides = split_overrides(argv, TrainRun)
    options = parse_options(PackOptions, rest, prog="megalith data pack", root=TrainRun)
    run = resolve_run(options.recipe, overrides)
    output = Path(options.output)
    raise_all(_problems(run, options))
    tokenizer = build_tokenizer(run.tokenizer)
    dataset = build_conversations(
        replace(run.data, sft=replace(run.data.sft, packs=None)),
        replace(SampleSettings.of_run(run, eod=None), whole_documents=True),
        split="train",
        num_samples=None,
        tokenizer=tokenizer,
        tokenizer_path=run.tokenizer.path,
    )
    packing_input = dataset.packing_input()
    packs = pack_first_fit(packing_input, run.seed)
    write_packs(output, packing_input, packs)
    report = summarize_packing(packs, packing_input.lengths, packing_input.seq_len)
    if options.json:
        print_json({"output": str(output), "seq_len": packing_input.seq_len, **asdict(report)})
    else:
        print(f"wrote {output}: {format_report(report, packing_input.seq_len)}")
        print(f"use it with --data.sft.packs {output}")
    return 0


def _problems(run: TrainRun, options: PackOptions) -> list[str]:
    problems = []
    if not run.data.sft.used():
        problems.append(
            f"{options.recipe} reads no conversations (data.sft.path={list(run.data.sft.path)}). "
            "Set data.sft.path, or "
            f"use another recipe. To tokenize text, use `megalith prepare`."
        )
    if run.train.tokens_per_microbatch is not None:
        problems.append(
            f"train.tokens_per_microbatch={run.train.tokens_per_microbatch}: conversations are "
            "packed in every step, so a file of packs is not used. Set "
            "train.tokens_per_microbatch=none."
        )
    if Path(options.output).exists() and not options.overwrite:
        problems.append(
            f"--output={options.output} already exists. Pass --overwrite to replace it."
        )
    return problems


def format_report(report: PackReport, seq_len: int) -> str:
    """Format the report for the terminal.

    >>> print(format_report(PackReport(3, 2, 4, 0.5, 4 / 3, ((1, 1, 2), (2, 2, 1))), 80))
    4 conversations in 3 rows of 80 tokens (2 at least)
      fill  50.0%, 1.3 conversations in a row on average
      rows with
              1  ######################################## 2
              2  #################### 1
    """
    lines = [
        f"{report.conversations:,} conversations in {report.rows:,} rows of {seq_len:,} tokens "
        f"({report.fewest:,} at "
        f"least)",
        f"  fill  {report.fill:.1%}, {report.mean:.1f} conversations in a row on average",
        "  rows with",
    ]
    most = max((count for *_, count in report.histogram), default=1)
    for first, last, count in report.histogram:
        name = str(first) if first == last else f"{first}-{last}"
        lines.append(f"  {name:>9}  {'#' * -(-count * WIDTH // most)} {count:,}")
    return "\n".join(lines)
