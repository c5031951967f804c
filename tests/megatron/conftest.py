"""A Llama to change one argument of."""

from collections.abc import Callable, Sequence

import pytest

from megalith.megatron.translate import Translation, translate

TINY_LLAMA = (
    "--num-layers 2 --hidden-size 96 --num-attention-heads 6 --group-query-attention "
    "--num-query-groups 3 "
    "--ffn-hidden-size 160 --seq-length 32 --max-position-embeddings 64 --position-embedding-type "
    "rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--attention-dropout 0 "
    "--hidden-dropout 0.0 --micro-batch-size 1 --global-batch-size 6 --train-iters 50 --lr 3e-4 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 128"
)

Translate = Callable[..., Translation]


@pytest.fixture
def tiny() -> Translate:
    """Translates TINY_LLAMA with arguments added (`"--bf16"`), and some left out
    (`without=("--swiglu",)`)."""

    def run(
        added: str = "",
        *,
        without: Sequence[str] = (),
        world: int | None = None,
        tokenizer_vocab: int | None = None,
    ) -> Translation:
        groups = [group.split() for group in f" {TINY_LLAMA}".split(" --")[1:]]
        kept = [
            word
            for name, *values in groups
            if f"--{name}" not in without
            for word in (f"--{name}", *values)
        ]
        return translate(
            [*kept, *added.split()], name="tiny", world=world, tokenizer_vocab=tokenizer_vocab
        )

    return run
