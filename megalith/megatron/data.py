"""Megatron's data, tokenizer and vocabulary as our `data`, `tokenizer` and vocabulary settings."""

import math
import re

from megalith.config.data import DEFAULT_SPLIT
from megalith.config.fields import Plain
from megalith.config.tokenizer import find_merges_file
from megalith.megatron.arguments import Arguments
from megalith.megatron.draft import Draft
from megalith.megatron.sft import translate_sft

_PATHS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")


def translate_data(draft: Draft, tokenizer_vocab: int | None) -> None:
    """Where tokens come from. `tokenizer_vocab`: the ids of the tokenizer that the arguments name,
    where known."""
    if draft.arguments.value("--sft"):
        translate_sft(draft)
    else:
        _text(draft)
    _tokenizer(draft, tokenizer_vocab)
    _padding(draft)
    draft.settings.setdefault(
        "model.vocab_size", draft.number("--vocab-size")
    )  # of a run that is refused


def _text(draft: Draft) -> None:
    """Running text in .bin/.idx pairs, or made up."""
    for flag in (*_PATHS, "--data-cache-path", "--mid-level-dataset-surplus"):
        draft.copy(flag)
    if draft.arguments.value("--mock-data"):
        draft.put("--mock-data", "data.mock", True)
    if draft.arguments.value("--no-mmap-bin-files"):
        draft.put("--no-mmap-bin-files", "data.mmap", False)
    _split(draft)
    _documents(draft)
    _sampler(draft)


def _split(draft: Draft) -> None:
    split = draft.arguments.value("--split")
    if split is None:
        return
    words = ",".join(
        re.findall(r"[.0-9]+", str(split))
    )  # Megatron takes the numbers out of any text
    if words == DEFAULT_SPLIT and not draft.arguments.value("--mock-data"):
        draft.say("already", "--split", "the default, in Megatron and here")
    else:
        draft.put("--split", "data.split", words)


def _documents(draft: Draft) -> None:
    """What end-of-document tokens do to attention, to positions, and to the loss."""
    arguments = draft.arguments
    masks = ("--reset-attention-mask", "--dataloader-inter-document-masking")
    cut = next((flag for flag in masks if arguments.value(flag)), None)
    masked = "--eod-mask-loss" if arguments.value("--eod-mask-loss") else None
    if masked:
        draft.put(masked, "data.eod_mask_loss", True)
    if cut:
        for flag in (*masks, "--reset-position-ids"):
            if arguments.given(flag):
                draft.put(flag, "data.document_masking", True)
    elif arguments.value("--reset-position-ids"):
        text = (
            "positions start again together with attention. Add --reset-attention-mask, or "
            "remove it"
        )
        draft.say("not mapped", "--reset-position-ids", text, "numbers")
    if cut and not masked:
        text = (
            "the first token of a document is not predicted from the one before it; Megatron does "
            "predict it, unless --eod-mask-loss is given"
        )
        draft.say("explained", cut, text, "numbers")
    either = masked or cut
    if either and not arguments.given("--calculate-per-token-loss"):
        text = (
            "microbatches have different numbers of labels now: the loss here is the sum over the "
            "global batch "
            "divided by its labels, Megatron's the mean of the means of its microbatches. They are "
            "the same with --calculate-per-token-loss"
        )
        draft.say("explained", either, text, "numbers")


def _sampler(draft: Draft) -> None:
    """In which order samples are read."""
    kind, whole = (
        draft.arguments.value("--dataloader-type"),
        draft.arguments.value("--no-data-sharding"),
    )
    if kind == "external":
        text = (
            "samples come from code that Megatron is given. Write them into a .bin/.idx pair "
            "with `megalith prepare`"
        )
        draft.say("not mapped", "--dataloader-type", text, "numbers")
    elif kind == "cyclic" and whole:
        for flag in ("--dataloader-type", "--no-data-sharding"):
            draft.put(flag, "data.sampler", "cyclic")
    else:
        draft.put(
            "--dataloader-type",
            "data.sampler",
            "cyclic_per_rank" if kind == "cyclic" else "sequential",
        )


KINDS = {
    "HuggingFaceTokenizer": "huggingface",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
    "SFTTokenizer": "huggingface",
    "GPT2BPETokenizer": "huggingface",
}
"""Megatron's tokenizers that are read from files, and ours."""

GPT2 = "GPT2BPETokenizer"

TIKTOKEN_VOCABULARY = 131_072
"""Ids of a TikTokenizer without --vocab-size."""


def tokenizer_settings(arguments: Arguments) -> dict[str, tuple[str, Plain]]:
    """Fields of our tokenizer read from files, each with the flag that it comes from; none for the
    others."""
    kind = KINDS.get(str(arguments.value("--tokenizer-type")))
    if kind is None:
        return {}
    flag = _named_by(arguments)
    fields_by_name: dict[str, tuple[str, Plain]] = {
        "kind": ("--tokenizer-type", kind),
        "path": (flag, arguments.value(flag)),
    }
    if arguments.value("--tokenizer-hf-no-include-special-tokens"):
        fields_by_name["add_special_tokens"] = ("--tokenizer-hf-no-include-special-tokens", False)
    if kind == "sentencepiece" and arguments.value("--tokenizer-type") != "Llama2Tokenizer":
        fields_by_name["add_special_tokens"] = ("--tokenizer-type", False)
    if kind == "tiktoken":
        flags = {
            "pattern": "--tiktoken-pattern",
            "num_special_tokens": "--tiktoken-num-special-tokens",
            "special_tokens": "--tiktoken-special-tokens",
        }
        fields_by_name |= {
            name: (flag, arguments.value(flag))
            for name, flag in flags.items()
            if arguments.given(flag)
        }
        fields_by_name["vocab_size"] = (
            "--vocab-size",
            arguments.value("--vocab-size") or TIKTOKEN_VOCABULARY,
        )
    return fields_by_name


def _named_by(arguments: Arguments) -> str:
    """The argument that names a tokenizer's files."""
    return "--vocab-file" if arguments.value("--tokenizer-type") == GPT2 else "--tokenizer-model"


def _tokenizer(draft: Draft, tokenizer_vocab: int | None) -> None:
    kind, size = draft.arguments.value("--tokenizer-type"), draft.arguments.value("--vocab-size")
    if kind == "NullTokenizer":
        if draft.need("--vocab-size", "the number of ids"):
            draft.put("--tokenizer-type", "tokenizer.kind", "null")
            draft.put("--vocab-size", "tokenizer.vocab_size", size)
            draft.put("--vocab-size", "model.vocab_size", size)
            text = (
                "the last of these ids ends documents; Megatron before 0.18 adds one more id "
                "for that"
            )
            draft.say("explained", "--vocab-size", text)
    elif kind in KINDS and (kind != GPT2 or _merges_are_beside(draft)):
        _from_files(draft, tokenizer_vocab)
    elif kind not in KINDS:
        text = (
            f"only {', '.join(KINDS)} and NullTokenizer are read. Save the same tokenizer as a "
            "Hugging Face folder "
            "(tokenizer.json) and use --tokenizer-type HuggingFaceTokenizer --tokenizer-model "
            "FOLDER"
        )
        draft.say("not mapped", "--tokenizer-type", text, "model")


def _merges_are_beside(draft: Draft) -> bool:
    """Whether the two files of a GPT-2 tokenizer are called and lie as they are looked for here;
    said, if not."""
    vocabulary, merges = (
        str(draft.arguments.value(flag) or "") for flag in ("--vocab-file", "--merge-file")
    )
    wanted = find_merges_file(vocabulary)
    if wanted is not None and wanted == merges:
        draft.say(
            "already",
            "--merge-file",
            "merges are looked for beside the vocabulary, where these are",
        )
        return True
    if vocabulary and merges:
        flag, text = (
            "--merge-file",
            "vocabulary and merges must lie in one folder, as NAMEvocab.json and NAMEmerges.txt",
        )
    else:
        flag, text = (
            "--tokenizer-type",
            f"the default, {GPT2}, is read from --vocab-file and --merge-file",
        )
    text += (
        ". Pass such files, or --tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER "
        "(tokenizer.json)"
    )
    draft.say("not mapped", flag, text, "model")
    return False


def _from_files(draft: Draft, tokenizer_vocab: int | None) -> None:
    named = _named_by(draft.arguments)
    draft.need(named, "the tokenizer's file or folder, or its name on the hub")
    for name, (flag, value) in tokenizer_settings(draft.arguments).items():
        draft.put(flag, f"tokenizer.{name}", value)
    size = draft.arguments.value("--vocab-size")
    if size is not None:
        draft.put("--vocab-size", "model.vocab_size", size)
    elif draft.settings.get("tokenizer.kind") == "tiktoken":
        draft.put(
            "--vocab-size", "model.vocab_size", TIKTOKEN_VOCABULARY, "left out: as in Megatron"
        )
    elif tokenizer_vocab is not None:
        draft.put(named, "model.vocab_size", tokenizer_vocab, "counted in its files")
    else:
        draft.problems.append(
            f"{named} {draft.arguments.value(named)}: the tokenizer's files are not on this "
            "machine, so the size of "
            f"the vocabulary is not known. Pass --vocab-size with the number of its ids."
        )


def _padding(draft: Draft) -> None:
    """Rows of the vocabulary's table: Megatron pads to a multiple of so many per tensor-parallel
    rank."""
    arguments = draft.arguments
    padded = arguments.value("--padded-vocab-size")
    if padded is not None:
        draft.put(
            "--padded-vocab-size",
            "model.pad_vocab_to_multiple_of",
            padded,
            "the table has exactly these rows",
        )
    elif arguments.value("--no-pad-vocab-size"):
        draft.put("--no-pad-vocab-size", "model.pad_vocab_to_multiple_of", 1)
    else:
        each, tp = (
            draft.number("--make-vocab-size-divisible-by"),
            draft.number("--tensor-model-parallel-size"),
        )
        text = f"{each} · tp {tp}" if tp > 1 else ""
        draft.put(
            "--make-vocab-size-divisible-by", "model.pad_vocab_to_multiple_of", each * tp, text
        )
    size, multiple = (
        draft.settings.get("model.vocab_size"),
        draft.settings["model.pad_vocab_to_multiple_of"],
    )
    if isinstance(size, int) and size > 0 and multiple > 0 and size % multiple:
        rows = -(-size // multiple) * multiple
        flag = "--make-vocab-size-divisible-by" if padded is None else "--padded-vocab-size"
        text = (
            f"the {rows - size} rows beyond the {size} tokens are never predicted; in Megatron "
            "they take part in the "
            f"softmax, so its first losses are higher by about {math.log(rows / size):.4f}"
        )
        draft.say("explained", flag, text)
