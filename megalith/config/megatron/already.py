"""Megatron's flags that need nothing here: so anyway, or done differently with the same result."""

from megalith.config.megatron.table import Group

# so here anyway
ALREADY = (
    Group(
        verdict="already", effect="none",
        reason="the loss is always the sum over the global batch divided by its labels",
        flags="--calculate-per-token-loss!",
    ),
    Group(
        verdict="already", effect="none",
        reason="gradients are always added in fp32, in buckets, each sent as soon as it is full",
        flags="""
            --DDP-impl --accumulate-allreduce-grads-in-fp32! --ddp-average-in-collective! --ddp-num-buckets
            --ddp-pad-buckets-for-high-nccl-busbw! --ddp-param-name-patterns-for-fp32-local-accumulation
            --ddp-reduce-scatter-with-fp32-accumulation! --fp32-allreduce! --gradient-accumulation-fusion!
            --no-contiguous-buffers-in-local-ddp! --no-gradient-accumulation-fusion! --no-gradient-reduce-div-fusion!
            --use-contiguous-buffers-in-ddp!
        """,
    ),
    Group(
        verdict="already", effect="none",
        reason=(
            "communication hides behind computation wherever it can, with the same numbers; parallel.overlap=false "
            "turns all of it off"
        ),
        flags="""
            --align-grad-reduce! --align-param-gather! --delay-param-gather! --disable-align-grad-reduce!
            --disable-tp-comm-bulk-dgrad! --disable-tp-comm-bulk-wgrad! --no-align-grad-reduce! --no-align-param-gather!
            --no-async-tensor-model-parallel-allreduce! --no-delay-grad-reduce! --no-overlap-p2p-communication!
            --no-tp-comm-bulk-dgrad! --no-tp-comm-bulk-wgrad!
            --overlap-grad-reduce! --overlap-p2p-communication! --overlap-p2p-communication-warmup-flush!
            --overlap-param-gather! --overlap-param-gather-with-optimizer-step!
        """,
    ),
    Group(
        verdict="already", effect="none", switch="--num-experts",
        reason="experts for all tokens always compute while tokens are on their way to the others, and their gradients",
        flags="--moe-shared-expert-overlap!",
    ),
    Group(
        verdict="already", effect="none",
        reason="stages send each other hidden states in the one way there is here, cut over tp where they are cut",
        flags="""
            --no-scatter-gather-tensors-in-pipeline! --pipeline-model-parallel-comm-backend --use-ring-exchange-p2p!
        """,
    ),
    Group(
        verdict="already", effect="none",
        reason="buffers of sharded weights and gradients are planned here",
        flags="""
            --fsdp-db-use-persist-buf-on-alloc-fail! --fsdp-double-buffer! --fsdp-manual-registration!
            --megatron-fsdp-enable-fine-grained-param-gather! --megatron-fsdp-max-pool-double-buffer!
            --megatron-fsdp-version --no-use-layer-wise-param-layout! --suggested-communication-unit-size
        """,
    ),
    Group(
        verdict="already", effect="none",
        reason="the softmax of attention is always computed in fp32; the scaling only served fp16",
        flags="--apply-query-key-layer-scaling! --attention-softmax-in-fp32! --no-query-key-layer-scaling!",
    ),
    Group(
        verdict="already", effect="none",
        reason=(
            "which kernel computes an operation is chosen here by what the machine has; what it computes stays "
            "the same"
        ),
        flags="""
            --bias-gelu-fusion! --cross-entropy-fusion-impl --cross-entropy-loss-fusion!
            --disable-clone-scatter-output-in-embedding! --disable-jit-fuser! --fallback-to-eager-attn!
            --flash-attention-version --fused-residual-rmsnorm! --kitchen-attention-backend
            --no-bias-dropout-fusion!
            --no-clone-scatter-output-in-embedding! --no-masked-softmax-fusion! --no-persist-layer-norm!
            --no-scaled-masked-softmax-fusion! --scaled-upper-triang-masked-softmax-fusion
            --transformer-impl --use-flash-attn! --use-fused-weighted-squared-relu!
            --use-grouped-gemm-for-dense-mlp! --use-kitchen-attention! --use-te-activation-func!
            --use-transformer-engine-op-fuser!
        """,
    ),
    Group(
        verdict="already", effect="none",
        reason="processes find each other through torchrun or `megalith train --nproc`; the backend follows the device",
        flags="""
            --disable-gloo-process-groups! --distributed-backend --distributed-timeout-seconds-after-init
            --high-priority-stream-groups --initialize-socket-comms! --lazy-mpu-init --local-rank --local_rank
            --nccl-communicator-config-path --sharp-enabled-group --use-sharp!
        """,
    ),
    Group(
        verdict="already", effect="none",
        reason=(
            "samples are read a step ahead from mapped files: no worker processes, no stored masks, no counts "
            "beside them"
        ),
        flags="""
            --allow-ambiguous-pad-tokens! --data-impl --dataloader-defer-npy-index-mmap!
            --dataloader-fast-cache-load! --mmap-warmup! --no-create-attention-mask-in-dataloader!
            --num-dataset-builder-threads --num-workers --per-dataset-sequences-path --use-gigatoken!
        """,
    ),
    Group(
        verdict="already", effect="none",
        reason="the first weights are the same under every layout, drawn part by part without whole tensors in memory",
        flags="--data-parallel-random-init! --init-model-with-meta-device! --use-cpu-initialization!",
    ),
    Group(
        verdict="already", effect="none",
        reason="always in metrics.jsonl, and in TensorBoard where it is installed",
        flags="--log-throughput! --tensorboard-log-interval --tensorboard-queue-size",
    ),
    Group(
        verdict="already", effect="none",
        reason="any layout loads any checkpoint here",
        flags="""
            --auto-detect-ckpt-format! --ckpt-assume-constant-structure! --ckpt-fully-parallel-save!
            --dist-ckpt-optim-fully-reshardable! --distrib-optim-fully-reshardable-mem-efficient! --use-dist-ckpt!
        """,
    ),
    Group(
        verdict="already", effect="none",
        reason="Megatron refuses it unless positions are rotary, which have no table that could be left out",
        flags="--no-position-embedding!",
    ),
    Group(
        verdict="already", effect="none",
        reason="the model is built from the same parts as Megatron Core's",
        flags="--enable-experimental! --use-mcore-models!",
    ),
    Group(
        verdict="already", effect="none",
        reason="Megatron itself ignores the flag",
        flags="--onnx-safe --openai-gelu!",
    ),
    Group(
        verdict="already", effect="none",
        reason="that is how Hugging Face tokenizers are read",
        flags="--tokenizer-hf-include-special-tokens! --tokenizer-hf-no-use-fast! --tokenizer-hf-use-fast!",
    ),
    Group(
        verdict="already", effect="none",
        reason="padding is known by its place in a row, not by an id",
        flags="--null-tokenizer-pad-id",
    ),
)  # fmt: skip

# done differently here
EXPLAINED = (
    Group(
        verdict="explained", effect="none",
        reason=(
            "the schedule decides when gradients of weights are computed, with the same numbers: "
            "parallel.pipeline.schedule=zb-h1, zb-v or dualpipe-v moves them into the bubble"
        ),
        flags="--defer-embedding-wgrad-compute! --delay-wgrad-compute! --wgrad-deferral-limit",
    ),
    Group(
        verdict="explained", effect="none",
        reason="main weights and gradients of sharded parameters are fp32, whatever travels",
        flags="--megatron-fsdp-grad-comm-dtype --megatron-fsdp-main-grads-dtype --megatron-fsdp-main-params-dtype",
    ),
    Group(
        verdict="explained", effect="none",
        reason="the loss is computed in fp32, which is more exact",
        flags="--fp16-lm-cross-entropy!",
    ),
    Group(
        verdict="explained", effect="none",
        reason="SIGTERM and SIGINT always save and end the run with code 75; run the same command again to go on",
        flags="""
            --exit-signal --exit-signal-handler! --exit-signal-handler-for-dataloader!
            --exit-signal-handler-for-training!
        """,
    ),
    Group(
        verdict="explained", effect="none",
        reason="a global batch that does not divide is refused, with the sizes that do",
        flags="--decrease-batch-size-if-needed!",
    ),
    Group(
        verdict="explained", effect="none",
        reason="weights are always initialised, then replaced by what a checkpoint holds",
        flags="--no-initialization!",
    ),
    Group(
        verdict="explained", effect="none",
        reason="a resumed run takes a changed learning rate or length from its config, and lists the change",
        flags="""
            --override-lr-scheduler! --override-opt-param-scheduler! --override-opt_param-scheduler!
            --use-checkpoint-lr-scheduler! --use-checkpoint-opt-param-scheduler!
            --use-checkpoint-opt_param-scheduler!
        """,
    ),
    Group(
        verdict="explained", effect="none",
        reason="a run without a checkpoint in its folder starts from the first step, and says so",
        flags="--exit-on-missing-checkpoint!",
    ),
    Group(
        verdict="explained", effect="none",
        reason="checkpoints hold no random state: every draw follows from the seed and from what it is for",
        flags="--no-save-rng!",
    ),
    Group(
        verdict="explained", effect="none",
        reason=(
            "checkpoints have one format, which holds everything a resumed run needs: "
            "torch.distributed.checkpoint files and a manifest"
        ),
        flags="""
            --ckpt-drop-redundant-extra-state! --ckpt-format --disable-save-tokenizer-assets!
            --disable-strict-fsdp-dtensor-load! --dist-ckpt-format --dist-ckpt-save-pre-mcore-014!
            --dist-ckpt-strictness --no-save-tokenizer-assets! --no-strict-fsdp-dtensor-load!
            --save-tokenizer-assets! --strict-fsdp-dtensor-load! --verify-integrity!
        """,
    ),
    Group(
        verdict="explained", effect="none",
        reason=(
            "a gradient that is not finite skips the step or ends the run (optim.nonfinite_grad); spikes are "
            "yours to see in metrics.jsonl"
        ),
        flags="--check-for-large-grads! --check-for-spiky-loss!",
    ),
)  # fmt: skip
