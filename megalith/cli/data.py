"""`megalith data`: `info`, `cat`, `verify` and `merge` token stores, and `pack` conversations
into rows."""

from dataclasses import asdict, dataclass

from tyro.conf import Positional

from megalith.cli.arguments import parse_options
from megalith.cli.output import print_json
from megalith.config.data import TokenizerConfig
from megalith.data.indexed import IndexedDataset
from megalith.data.stores import find_stores, merge_stores, read_store_tokenizer, summarize
from megalith.data.tokenizer import Tokenizer, build_tokenizer, detect_tokenizer_kind
from megalith.errors import ConfigError, DataError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class DatasetInfoOptions:
    """Show the contents of a token store: documents, tokens, lengths, and the last token of
    documents."""

    prefix: Positional[str]
    """Prefix of the store: its path without .bin or .idx."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True, kw_only=True)
class DatasetVerifyOptions:
    """Verify that token stores follow the file format. Exit code 1 if one does not."""

    prefix: Positional[tuple[str, ...]]
    """Prefixes of stores, or folders that contain them."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True, kw_only=True)
class CatOptions:
    """Print the text of one document."""

    prefix: Positional[str]
    """Prefix of the store: its path without .bin or .idx."""
    document: int = 0
    """Number of the document, from 0."""
    tokenizer: str | None = None
    """`byte`, or the folder or file of a tokenizer; default: the tokenizer with which `megalith
    prepare` wrote the store."""
    ids: bool = False
    """Print token ids instead of text."""


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """Concatenate token stores in the given order."""

    input: tuple[str, ...]
    """Prefixes of stores, or folders whose stores are merged in the order of their names."""
    output: str
    """Prefix of the store to write."""
    overwrite: bool = False
    """Overwrite an existing store."""


def main(argv: list[str]) -> int:
    """Run `megalith data info|verify|cat|merge|pack`."""
    actions = {
        "info": show_info,
        "verify": verify,
        "cat": cat,
        "merge": merge,
        "pack": pack_conversations,
    }
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: megalith data {{{','.join(actions)}}} ...\n\n{__doc__}")
        return 0
    if argv[0] not in actions:
        advice = (
            " Did you mean `megalith prepare`?"
            if argv[0] == "prepare"
            else did_you_mean(argv[0], actions) or ""
        )
        raise ConfigError(
            f"{argv[0]} is not a subcommand of `megalith data`.{advice} Use one of "
            f"{', '.join(actions)}."
        )
    return actions[argv[0]](argv[1:])


def show_info(argv: list[str]) -> int:
    """Print the contents of a store."""
    options = parse_options(DatasetInfoOptions, argv, prog="megalith data info")
    summary = summarize(IndexedDataset(options.prefix))
    if options.json:
        print_json(asdict(summary))
        return 0
    print(f"{summary.prefix}: {summary.tokens:,} tokens as {summary.token_type}")
    print(f"  documents  {summary.documents:,}, {summary.empty_documents:,} of them empty")
    print(
        f"  sequences  {summary.sequences:,}, of {summary.shortest:,} to {summary.longest:,} "
        f"tokens, {summary.mean_length:,.1f} on average"
    )
    if summary.common_last_token is not None:
        print(
            f"  ends       {summary.common_last_share:.1%} of documents end with id "
            f"{summary.common_last_token}"
        )
    print(f"  files      .bin {summary.bin_nbytes:,} bytes, .idx {summary.idx_nbytes:,} bytes")
    return 0


def verify(argv: list[str]) -> int:
    """Print the problems of stores; return 1 if there are any."""
    options = parse_options(DatasetVerifyOptions, argv, prog="megalith data verify")
    prefixes = [prefix for path in options.prefix for prefix in find_stores(path)]
    problems_by_store = {prefix: _problems(prefix) for prefix in prefixes}
    if options.json:
        print_json(problems_by_store)
    else:
        for prefix, problems in problems_by_store.items():
            print(f"{prefix}: {'correct' if not problems else ''}")
            for problem in problems:
                print(f"  {problem}")
    return int(any(problems_by_store.values()))


def _problems(prefix: str) -> list[str]:
    try:
        return IndexedDataset(prefix).verify()
    except DataError as error:
        return [str(error)]


def cat(argv: list[str]) -> int:
    """Print one document."""
    options = parse_options(CatOptions, argv, prog="megalith data cat")
    ids = IndexedDataset(options.prefix).document(options.document).tolist()
    if options.ids:
        print(" ".join(str(token) for token in ids))
        return 0
    tokenizer = (
        read_store_tokenizer(options.prefix)
        if options.tokenizer is None
        else _build_named_tokenizer(options.tokenizer)
    )
    if ids and max(ids) >= tokenizer.vocab_size:
        raise DataError(
            f"document {options.document} of {options.prefix} has id {max(ids)}, but tokenizer "
            f"{options.tokenizer or 'byte'} has {tokenizer.vocab_size}. Pass the tokenizer of the "
            f"store with --tokenizer, or --ids."
        )
    print(tokenizer.decode(ids))
    return 0


def _build_named_tokenizer(tokenizer: str) -> Tokenizer:
    if tokenizer == "byte":
        return build_tokenizer(TokenizerConfig())
    return build_tokenizer(TokenizerConfig(kind=detect_tokenizer_kind(tokenizer), path=tokenizer))


def pack_conversations(argv: list[str]) -> int:
    """Pack conversations of a run into rows."""
    from megalith.cli.pack import pack  # imports torch

    return pack(argv)


def merge(argv: list[str]) -> int:
    """Concatenate stores."""
    options = parse_options(MergeOptions, argv, prog="megalith data merge")
    prefixes = [prefix for path in options.input for prefix in find_stores(path)]
    merge_stores(prefixes, options.output, overwrite=options.overwrite)
    merged = IndexedDataset(options.output)
    print(
        f"wrote {options.output}: {merged.num_tokens:,} tokens, {merged.num_documents:,} documents"
    )
    return 0
