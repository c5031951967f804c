"""Translate data, tokenizer, vocabulary and supervised fine-tuning to our settings."""

import math
import re

from megalith.config.data import DEFAULT_SPLIT, find_merges_file
from megalith.config.fields import Plain
from megalith.megatron.parse import Arguments, Draft

TOKENIZER_KINDS = {
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

TIKTOKEN_VOCAB_SIZE = 131_072
"""Vocabulary size of a TikTokenizer without --vocab-size."""

PROMPT_FORMATS = {
    "identity": "identity",
    "default": None,
    "nemotron-h-aligned": "nemotron-h-aligned",
    "nemotron-nano-v2": "nemotron-nano-v2",
}
"""Prompt formats and their chat templates; None: that of the tokenizer."""

_PATHS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
_TYPE, _MODEL, _VOCAB_FILE = "--tokenizer-type", "--tokenizer-model", "--vocab-file"
_VOCAB_SIZE, _PADDED = "--vocab-size", "--padded-vocab-size"
_DIVISOR = "--make-vocab-size-divisible-by"
_MASK, _EOD_MASK = "--reset-attention-mask", "--eod-mask-loss"
_POSITION_IDS, _LOADER_MASK = "--reset-position-ids", "--dataloader-inter-document-masking"


def translate_data(draft: Draft, tokenizer_vocab: int | None) -> None:
    """Translate data and tokenizer. `tokenizer_vocab`: vocabulary size of the tokenizer that the
    arguments name, if known."""
    if draft.arguments.value("--sft"):
        _translate_sft(draft)
    else:
        _translate_text(draft)
    _translate_tokenizer(draft, tokenizer_vocab)
    _translate_vocab_padding(draft)
    # a run without vocabulary size has a problem, but other settings depend on it
    draft.settings.setdefault("model.vocab_size", draft.number(_VOCAB_SIZE))


def _translate_text(draft: Draft) -> None:
    """Translate pretraining data in .bin/.idx files, or synthetic data."""
    for flag in (*_PATHS, "--data-cache-path", "--mid-level-dataset-surplus"):
        draft.copy(flag)
    if draft.arguments.value("--mock-data"):
        draft.put("--mock-data", "data.mock", True)
    if draft.arguments.value("--no-mmap-bin-files"):
        draft.put("--no-mmap-bin-files", "data.mmap", False)
    _translate_split(draft)
    _translate_documents(draft)
    _translate_sampler(draft)


def _translate_split(draft: Draft) -> None:
    value = draft.arguments.value("--split")
    if value is None:
        return
    split = ",".join(re.findall(r"[.0-9]+", str(value)))  # Megatron accepts any separators
    if split == DEFAULT_SPLIT and not draft.arguments.value("--mock-data"):
        draft.report("already", "--split", "this is the default of Megatron and Megalith")
    else:
        draft.put("--split", "data.split", split)


def _translate_documents(draft: Draft) -> None:
    """Translate the effect of end-of-document tokens on attention, position ids and the loss."""
    arguments = draft.arguments
    mask = next((flag for flag in (_MASK, _LOADER_MASK) if arguments.value(flag)), None)
    loss_mask = _EOD_MASK if arguments.value(_EOD_MASK) else None
    if loss_mask:
        draft.put(loss_mask, "data.eod_mask_loss", True)
    if mask:
        for flag in (_MASK, _LOADER_MASK, _POSITION_IDS):
            if arguments.given(flag):
                draft.put(flag, "data.document_masking", True)
    elif arguments.value(_POSITION_IDS):
        text = f"position ids restart only with the attention mask. Add {_MASK}, or remove it"
        draft.report("not mapped", _POSITION_IDS, text, "numbers")
    if mask and not loss_mask:
        text = (
            "the first token of a document is not predicted from the previous document; Megatron "
            f"predicts it, unless {_EOD_MASK} is given"
        )
        draft.report("explained", mask, text, "numbers")
    either = loss_mask or mask
    if either and not arguments.given("--calculate-per-token-loss"):
        text = (
            "microbatches now have different numbers of labels: the loss is the sum over the "
            "global batch divided by its labels, that of Megatron the mean of the means of its "
            "microbatches. With --calculate-per-token-loss they are the same"
        )
        draft.report("explained", either, text, "numbers")


def _translate_sampler(draft: Draft) -> None:
    """Translate the order in which samples are read."""
    flag, no_sharding = "--dataloader-type", "--no-data-sharding"
    kind = draft.arguments.value(flag)
    if kind == "external":
        text = (
            "samples come from code that is passed to Megatron. Write them to a .bin/.idx pair "
            "with `megalith prepare`"
        )
        draft.report("not mapped", flag, text, "numbers")
    elif kind == "cyclic" and draft.arguments.value(no_sharding):
        for name in (flag, no_sharding):
            draft.put(name, "data.sampler", "cyclic")
    else:
        sampler = "cyclic_per_rank" if kind == "cyclic" else "sequential"
        draft.put(flag, "data.sampler", sampler)


# --- tokenizer and vocabulary


def read_tokenizer_settings(arguments: Arguments) -> dict[str, tuple[str, Plain]]:
    """Return the flag and value of each setting of a tokenizer that is read from files; nothing for
    other tokenizers."""
    tokenizer_type, no_special = arguments.value(_TYPE), "--tokenizer-hf-no-include-special-tokens"
    kind = TOKENIZER_KINDS.get(str(tokenizer_type))
    if kind is None:
        return {}
    path_flag = _find_path_flag(arguments)
    settings: dict[str, tuple[str, Plain]] = {
        "kind": (_TYPE, kind),
        "path": (path_flag, arguments.value(path_flag)),
    }
    if arguments.value(no_special):
        settings["add_special_tokens"] = (no_special, False)
    if kind == "sentencepiece" and tokenizer_type != "Llama2Tokenizer":
        settings["add_special_tokens"] = (_TYPE, False)
    if kind == "tiktoken":
        for name, flag in (
            ("pattern", "--tiktoken-pattern"),
            ("num_special_tokens", "--tiktoken-num-special-tokens"),
            ("special_tokens", "--tiktoken-special-tokens"),
        ):
            if arguments.given(flag):
                settings[name] = (flag, arguments.value(flag))
        size = arguments.value(_VOCAB_SIZE) or TIKTOKEN_VOCAB_SIZE
        settings["vocab_size"] = (_VOCAB_SIZE, size)
    return settings


def _find_path_flag(arguments: Arguments) -> str:
    """Return the flag that names the files of the tokenizer."""
    return _VOCAB_FILE if arguments.value(_TYPE) == GPT2 else _MODEL


def _translate_tokenizer(draft: Draft, tokenizer_vocab: int | None) -> None:
    kind, size = draft.arguments.value(_TYPE), draft.arguments.value(_VOCAB_SIZE)
    if kind in TOKENIZER_KINDS:
        if kind != GPT2 or _check_merges_file(draft):
            _translate_tokenizer_files(draft, tokenizer_vocab)
    elif kind != "NullTokenizer":
        text = (
            f"only {', '.join(TOKENIZER_KINDS)} and NullTokenizer are supported. Save the same "
            f"tokenizer as a Hugging Face folder (tokenizer.json) and use {_TYPE} "
            f"HuggingFaceTokenizer {_MODEL} FOLDER"
        )
        draft.report("not mapped", _TYPE, text, "model")
    elif draft.need(_VOCAB_SIZE, "the vocabulary size"):
        draft.put(_TYPE, "tokenizer.kind", "null")
        draft.put(_VOCAB_SIZE, "tokenizer.vocab_size", size)
        draft.put(_VOCAB_SIZE, "model.vocab_size", size)
        text = "the last token id ends documents; Megatron before 0.18 adds one more id for that"
        draft.report("explained", _VOCAB_SIZE, text)


def _check_merges_file(draft: Draft) -> bool:
    """Return whether the two files of a GPT-2 tokenizer have the names that we expect, and report
    on them."""
    merges_flag = "--merge-file"
    vocab = str(draft.arguments.value(_VOCAB_FILE) or "")
    merges = str(draft.arguments.value(merges_flag) or "")
    expected = find_merges_file(vocab)
    if expected is not None and expected == merges:
        text = f"the merges file is found in the folder of {_VOCAB_FILE}"
        draft.report("already", merges_flag, text)
        return True
    if vocab and merges:
        flag, text = (
            merges_flag,
            ("both files must be in one folder, as NAMEvocab.json and NAMEmerges.txt"),
        )
    else:
        flag, text = _TYPE, f"the default, {GPT2}, needs {_VOCAB_FILE} and {merges_flag}"
    text += f". Pass such files, or {_TYPE} HuggingFaceTokenizer {_MODEL} FOLDER (tokenizer.json)"
    draft.report("not mapped", flag, text, "model")
    return False


def _translate_tokenizer_files(draft: Draft, tokenizer_vocab: int | None) -> None:
    path_flag, setting = _find_path_flag(draft.arguments), "model.vocab_size"
    draft.need(path_flag, "the tokenizer's file or folder, or its name on the hub")
    for name, (flag, value) in read_tokenizer_settings(draft.arguments).items():
        draft.put(flag, f"tokenizer.{name}", value)
    size = draft.arguments.value(_VOCAB_SIZE)
    if size is not None:
        draft.put(_VOCAB_SIZE, setting, size)
    elif draft.settings.get("tokenizer.kind") == "tiktoken":
        draft.put(_VOCAB_SIZE, setting, TIKTOKEN_VOCAB_SIZE, "the default of Megatron")
    elif tokenizer_vocab is not None:
        draft.put(path_flag, setting, tokenizer_vocab, "read from its files")
    else:
        draft.problems.append(
            f"{path_flag} {draft.arguments.value(path_flag)}: the tokenizer's files are not on "
            f"this machine, so the vocabulary size is not known. Pass {_VOCAB_SIZE} with it."
        )


def _translate_vocab_padding(draft: Draft) -> None:
    """Translate the padding of the vocabulary: to a multiple of a number times tp."""
    arguments, setting = draft.arguments, "model.pad_vocab_to_multiple_of"
    padded = arguments.value(_PADDED)
    if padded is not None:
        draft.put(_PADDED, setting, padded, "the table has exactly this number of rows")
    elif arguments.value("--no-pad-vocab-size"):
        draft.put("--no-pad-vocab-size", setting, 1)
    else:
        divisor, tp = draft.number(_DIVISOR), draft.number("--tensor-model-parallel-size")
        draft.put(_DIVISOR, setting, divisor * tp, f"{divisor} · tp {tp}" if tp > 1 else "")
    size, multiple = draft.settings.get("model.vocab_size"), draft.settings[setting]
    if isinstance(size, int) and size > 0 and multiple > 0 and size % multiple:
        rows = -(-size // multiple) * multiple
        text = (
            f"the {rows - size} rows after the {size} tokens are never predicted; in Megatron "
            "they take part in the softmax, so its first losses are higher by about "
            f"{math.log(rows / size):.4f}"
        )
        draft.report("explained", _DIVISOR if padded is None else _PADDED, text)


# --- supervised fine-tuning


def _translate_sft(draft: Draft) -> None:
    """Translate conversations, and how rows are filled with them."""
    arguments, loader = draft.arguments, "--dataloader-type"
    _translate_conversation_files(draft)
    if not _translate_packing(draft):
        draft.put("--sft", "data.sft.packing", "row", "one row per line of the file")
    draft.put("--sft", "data.sft.shuffle", "none")
    draft.put("--sft", "data.sft.overlong", "truncate")
    _translate_prompt_format(draft)
    for flag in (_EOD_MASK, _MASK, _POSITION_IDS, _LOADER_MASK):
        if arguments.given(flag):
            text = "each conversation is a separate document with its own labels"
            draft.report("already", flag, text)
    if arguments.value(loader) in ("cyclic", "external"):
        text = "conversations are shuffled by data.sft.shuffle. Remove it"
        draft.report("not mapped", loader, text, "numbers")


def _translate_conversation_files(draft: Draft) -> None:
    arguments, (path, train, valid, test) = draft.arguments, _PATHS
    for flag, name in ((path, "path"), (train, "path"), (valid, "valid_path")):
        if arguments.given(flag):
            draft.put(flag, f"data.sft.{name}", arguments.value(flag))
    draft.copy("--data-cache-path")
    if arguments.value("--mock-data"):
        text = (
            "synthetic conversations are additions; those of Megatron follow "
            "--sft-mock-dataset-config-json"
        )
        draft.put("--mock-data", "data.sft.mock_conversations", 10_000, text)
    if arguments.given(test):
        text = "there is no test split of conversations; evaluate it separately"
        draft.report("already", test, text)
    if arguments.given("--split") and not arguments.value("--mock-data"):
        text = (
            "a file of conversations is not split. Split it, and pass the validation part with "
            f"{valid}"
        )
        draft.report("not mapped", "--split", text, "numbers")


def _translate_packing(draft: Draft) -> bool:
    """Return whether conversations are packed in each step up to a number of tokens."""
    scheduler, max_tokens = "--sequence-packing-scheduler", "--max-seqlen-per-dp-cp-rank"
    kind, setting = draft.arguments.value(scheduler), "train.tokens_per_microbatch"
    if kind is None:
        return False
    if kind != "dp_balanced":
        text = (
            "not implemented: a context-parallel size per conversation; results are the same with "
            f"{scheduler} dp_balanced"
        )
        draft.report("not mapped", scheduler, text)
        return False
    if draft.need(max_tokens, "the tokens of a microbatch on each rank"):
        value = draft.arguments.value(max_tokens)
        text = "a step has --global-batch-size conversations, in as many microbatches as needed"
        draft.put(max_tokens, setting, value, text)
        draft.put(scheduler, setting, value, "balanced by FLOPs, too")
    return True


def _translate_prompt_format(draft: Draft) -> None:
    """Translate the chat template of conversations."""
    flag = "--sft-tokenizer-prompt-format"
    name = str(draft.arguments.value(flag))
    if name not in PROMPT_FORMATS:
        text = (
            f"there is no built-in template {name}. Write it to a Jinja file and set "
            "data.sft.template to that file"
        )
        draft.report("not mapped", flag, text, "numbers")
    elif name == "default":
        draft.put(flag, "data.sft.loss_on", "all", "with the tokenizer's own template")
    else:
        text = "an end token follows each answer and is trained on" if name == "identity" else ""
        draft.put(flag, "data.sft.template", PROMPT_FORMATS[name], text)
