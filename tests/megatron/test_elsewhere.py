"""Tests of megalith/megatron/elsewhere.py."""

import pytest

from tests.megatron.conftest import Translate


@pytest.mark.parametrize(
    ("added", "replacement"),
    [
        ("--batch-size 4", "Use --micro-batch-size and --global-batch-size"),
        ("--warmup 0.1", "Use --lr-warmup-fraction"),
        ("--model-parallel-size 2", "Use --tensor-model-parallel-size"),
        ("--checkpoint-activations", "Use --recompute-granularity full --recompute-method uniform"),
        ("--moe-token-dropping", "Use --moe-expert-capacity-factor"),
        ("--input corpus.jsonl", "use `megalith prepare`"),
        ("--saver core", "use `megalith convert`"),
        ("--vision-model-type clip", "--vision-model-type clip: belongs to"),
    ],
)
def test_what_the_training_does_not_read_names_what_does(
    tiny: Translate, added: str, replacement: str
) -> None:
    translation = tiny(added)
    texts = [
        f"{entry.flag}: {entry.text}"
        for entry in translation.entries
        if entry.verdict == "not mapped"
    ]
    assert len(texts) == 1 and replacement in texts[0]


def test_flags_of_other_models_in_the_shared_parser_do_not_matter(tiny: Translate) -> None:
    assert (
        tiny("--mask-prob 0.15 --retro-encoder-layers 2 --num-classes 10").refusals(strict=True)
        == []
    )
