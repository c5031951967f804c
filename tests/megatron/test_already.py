"""Tests of megalith/megatron/already.py."""

import pytest

from megalith.megatron.arguments import UNMAPPED
from tests.megatron.conftest import Translate

NOT_IMPLEMENTED = """
    --align-grad-reduce --align-param-gather --ckpt-assume-constant-structure
    --ddp-pad-buckets-for-high-nccl-busbw --delay-param-gather --disable-align-grad-reduce
    --disable-tp-comm-bulk-dgrad --disable-tp-comm-bulk-wgrad
    --distributed-timeout-seconds-after-init --fsdp-db-use-persist-buf-on-alloc-fail
    --fsdp-double-buffer --fsdp-manual-registration --high-priority-stream-groups
    --initialize-socket-comms --kitchen-attention-backend
    --megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-max-pool-double-buffer
    --megatron-fsdp-version --nccl-communicator-config-path --no-align-grad-reduce
    --no-align-param-gather --no-tp-comm-bulk-dgrad --no-tp-comm-bulk-wgrad
    --no-use-layer-wise-param-layout --overlap-p2p-communication-warmup-flush
    --overlap-param-gather-with-optimizer-step --pipeline-model-parallel-comm-backend
    --sharp-enabled-group --suggested-communication-unit-size --use-gigatoken
    --use-kitchen-attention --use-ring-exchange-p2p --use-sharp
"""
DONE_DIFFERENTLY = """
    --DDP-impl --apply-query-key-layer-scaling --auto-detect-ckpt-format --bias-gelu-fusion
    --data-impl --data-parallel-random-init --ddp-average-in-collective --ddp-num-buckets
    --disable-gloo-process-groups --distributed-backend --lazy-mpu-init --mmap-warmup
    --no-async-tensor-model-parallel-allreduce --no-contiguous-buffers-in-local-ddp
    --no-delay-grad-reduce --no-gradient-accumulation-fusion --no-gradient-reduce-div-fusion
    --no-overlap-p2p-communication --no-scatter-gather-tensors-in-pipeline
    --num-dataset-builder-threads --num-workers --per-dataset-sequences-path
    --tensorboard-log-interval --tensorboard-queue-size --tokenizer-hf-no-use-fast
    --transformer-impl --use-flash-attn
"""


@pytest.mark.parametrize(
    ("verdict", "names"), [("not mapped", NOT_IMPLEMENTED), ("explained", DONE_DIFFERENTLY)]
)
def test_a_flag_that_nothing_implements_is_not_called_already_done(
    verdict: str, names: str
) -> None:
    assert {name: UNMAPPED[name].group.verdict for name in names.split()} == dict.fromkeys(
        names.split(), verdict
    )


def test_transport_flags_are_listed_as_not_mapped(tiny: Translate) -> None:
    done = tiny(
        "--nccl-communicator-config-path x --use-sharp --distributed-timeout-seconds-after-init 60"
    )
    entries = {
        entry.flag.split()[0]: entry for entry in done.entries if entry.verdict == "not mapped"
    }
    assert entries.keys() == {
        "--nccl-communicator-config-path",
        "--use-sharp",
        "--distributed-timeout-seconds-after-init",
    }
    assert "NCCL_" in entries["--use-sharp"].text and done.refusals(strict=True) == []


def test_flags_that_need_nothing_refuse_nothing_even_when_strict(tiny: Translate) -> None:
    added = (
        "--use-flash-attn --transformer-impl local --accumulate-allreduce-grads-in-fp32 "
        "--overlap-grad-reduce "
        "--calculate-per-token-loss --num-workers 4 --attention-softmax-in-fp32 "
        "--no-position-embedding "
        "--ckpt-format torch_dist --exit-signal-handler --grad-reduce-in-bf16 --openai-gelu"
    )
    done = tiny(added)
    assert done.run == tiny().run
    assert done.refusals(strict=True) == []
    message = {
        entry.flag.split()[0] for entry in done.entries if entry.verdict in ("already", "explained")
    }
    assert {word for word in added.split() if word.startswith("--")} <= message
