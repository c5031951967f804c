"""Megatron's supervised fine-tuning as our `data.sft`: conversations, their template, and how rows
are filled."""

from megalith.megatron.draft import Draft

FORMATS = {
    "identity": "identity",
    "default": None,
    "nemotron-h-aligned": "nemotron-h-aligned",
    "nemotron-nano-v2": "nemotron-nano-v2",
}
"""Prompt formats that are known here, and their templates; None: the tokenizer's own."""

_PATHS = {"--data-path": "path", "--train-data-path": "path", "--valid-data-path": "valid_path"}
_TEXT_FLAGS = (
    "--eod-mask-loss",
    "--reset-attention-mask",
    "--reset-position-ids",
    "--dataloader-inter-document-masking",
)


def translate_sft(draft: Draft) -> None:
    """What `--sft` makes of the data."""
    arguments = draft.arguments
    for flag, name in _PATHS.items():
        if arguments.given(flag):
            draft.put(flag, f"data.sft.{name}", arguments.value(flag))
    draft.copy("--data-cache-path")
    if arguments.value("--mock-data"):
        text = (
            "made-up conversations are sums here; Megatron's are drawn from "
            "--sft-mock-dataset-config-json"
        )
        draft.put("--mock-data", "data.sft.mock_conversations", 10_000, text)
    if arguments.given("--test-data-path"):
        draft.say(
            "already",
            "--test-data-path",
            "a test split of conversations is not read; evaluate it by itself",
        )
    if arguments.given("--split") and not arguments.value("--mock-data"):
        text = (
            "one file of conversations is not divided here. Divide it, and name the parts with "
            "--valid-data-path"
        )
        draft.say("not mapped", "--split", text, "numbers")
    if not _budget(draft):
        draft.put("--sft", "data.sft.packing", "row", "a row for each line of the file")
    draft.put("--sft", "data.sft.shuffle", "none")
    draft.put("--sft", "data.sft.overlong", "truncate")
    _format(draft)
    for flag in _TEXT_FLAGS:
        if arguments.given(flag):
            draft.say(
                "already",
                flag,
                "each conversation is a document of its own, with labels of its own",
            )
    if arguments.value("--dataloader-type") in ("cyclic", "external"):
        text = "conversations are shuffled by data.sft.shuffle. Remove it"
        draft.say("not mapped", "--dataloader-type", text, "numbers")


def _budget(draft: Draft) -> bool:
    """Whether conversations are packed step by step, into packs of a number of tokens."""
    scheduler, size = "--sequence-packing-scheduler", "--max-seqlen-per-dp-cp-rank"
    kind = draft.arguments.value(scheduler)
    if kind is None:
        return False
    if kind != "dp_balanced":
        text = (
            "not yet: as many context-parallel ranks as each conversation needs; the numbers are "
            f"the same with {scheduler} dp_balanced"
        )
        draft.say("not mapped", scheduler, text)
        return False
    if draft.need(size, "the tokens of a microbatch on each rank"):
        text = "a step has --global-batch-size conversations, in as many microbatches as they need"
        draft.put(size, "train.tokens_per_microbatch", draft.arguments.value(size), text)
        draft.put(
            scheduler,
            "train.tokens_per_microbatch",
            draft.arguments.value(size),
            "balanced by operations, too",
        )
    return True


def _format(draft: Draft) -> None:
    """How conversations become text."""
    wanted = str(draft.arguments.value("--sft-tokenizer-prompt-format"))
    if wanted not in FORMATS:
        text = (
            f"the template of {wanted} is not built in. Put it into a Jinja file and set "
            "data.sft.template to that"
        )
        draft.say("not mapped", "--sft-tokenizer-prompt-format", text, "numbers")
    elif wanted == "default":
        draft.put(
            "--sft-tokenizer-prompt-format",
            "data.sft.loss_on",
            "all",
            "with the tokenizer's own template",
        )
    else:
        text = "an end token follows each answer, and is learned" if wanted == "identity" else ""
        draft.put("--sft-tokenizer-prompt-format", "data.sft.template", FORMATS[wanted], text)
