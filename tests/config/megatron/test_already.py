"""Tests of megalith/config/megatron/already.py."""

from tests.config.megatron.conftest import Translate


def test_flags_that_need_nothing_refuse_nothing_even_when_strict(tiny: Translate) -> None:
    added = (
        "--use-flash-attn --transformer-impl local --accumulate-allreduce-grads-in-fp32 --overlap-grad-reduce "
        "--calculate-per-token-loss --num-workers 4 --attention-softmax-in-fp32 --no-position-embedding "
        "--ckpt-format torch_dist --exit-signal-handler --grad-reduce-in-bf16 --openai-gelu"
    )
    done = tiny(added)
    assert done.run == tiny().run
    assert done.refusals(strict=True) == []
    said = {entry.flag.split()[0] for entry in done.entries if entry.verdict in ("already", "explained")}
    assert {word for word in added.split() if word.startswith("--")} <= said
