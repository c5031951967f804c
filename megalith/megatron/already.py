"""Megatron's flags that need nothing here: what they ask for is implemented, or done
differently."""

from megalith.megatron.table import FlagGroup

# so here anyway
ALREADY = (
    FlagGroup(
        verdict="already",
        effect="none",
        reason="the loss is always the sum over the global batch divided by its labels",
        flags="--calculate-per-token-loss!",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="gradients are always added in fp32, in contiguous buckets, each sent as soon as it "
        "is full",
        flags="""
            --accumulate-allreduce-grads-in-fp32!
            --ddp-param-name-patterns-for-fp32-local-accumulation
            --ddp-reduce-scatter-with-fp32-accumulation! --fp32-allreduce!
            --gradient-accumulation-fusion! --use-contiguous-buffers-in-ddp!
        """,
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason=(
            "gradient sums, updated weights and the messages of stages travel behind computation; "
            "parallel.overlap=false turns it off"
        ),
        flags="--overlap-grad-reduce! --overlap-p2p-communication! --overlap-param-gather!",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        switch="--num-experts",
        reason="experts for all tokens always compute while tokens are on their way to the others, "
        "and their gradients",
        flags="--moe-shared-expert-overlap!",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="the softmax of attention is always computed in fp32, from unscaled queries "
        "and keys",
        flags="--attention-softmax-in-fp32! --no-query-key-layer-scaling!",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="the rank on a machine comes from torchrun or `megalith train --nproc`, which sets "
        "it for each process",
        flags="--local-rank --local_rank",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="attention masks follow from document boundaries, and padding from its place in a "
        "row, not from an id",
        flags="--allow-ambiguous-pad-tokens! --no-create-attention-mask-in-dataloader!",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="the first weights are the same under every layout, drawn part by part without "
        "whole tensors in memory",
        flags="--init-model-with-meta-device! --use-cpu-initialization!",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="always in metrics.jsonl, and in TensorBoard where it is installed",
        flags="--log-throughput!",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="every rank writes its part of a checkpoint, and any layout loads any checkpoint",
        flags="""
            --ckpt-fully-parallel-save! --dist-ckpt-optim-fully-reshardable!
            --distrib-optim-fully-reshardable-mem-efficient! --use-dist-ckpt!
        """,
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="Megatron refuses it unless positions are rotary, which have no table that could be "
        "left out",
        flags="--no-position-embedding!",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="selects the only model there is, or permits other arguments, each of which has its "
        "own answer",
        flags="--enable-experimental! --use-mcore-models!",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="Megatron itself ignores the flag",
        flags="--onnx-safe --openai-gelu!",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="that is how Hugging Face tokenizers are read",
        flags="--tokenizer-hf-include-special-tokens! --tokenizer-hf-use-fast!",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="padding is known by its place in a row, not by an id",
        flags="--null-tokenizer-pad-id",
    ),
)

# done differently here
EXPLAINED = (
    FlagGroup(
        verdict="explained",
        effect="none",
        reason=(
            "data parallelism has one implementation: it sums fp32 gradients in contiguous buckets "
            "of parallel.bucket_numel, and the loss is divided before backward. The flag is not "
            "followed"
        ),
        flags="""
            --DDP-impl --ddp-average-in-collective! --ddp-num-buckets
            --no-contiguous-buffers-in-local-ddp! --no-gradient-accumulation-fusion!
            --no-gradient-reduce-div-fusion!
        """,
    ),
    FlagGroup(
        verdict="explained",
        effect="none",
        reason=(
            "one setting, parallel.overlap, turns all overlapped communication on or off, with the "
            "same numbers; it "
            "stays on"
        ),
        flags="--no-async-tensor-model-parallel-allreduce! --no-delay-grad-reduce! "
        "--no-overlap-p2p-communication!",
    ),
    FlagGroup(
        verdict="explained",
        effect="none",
        reason="stages send hidden states cut over tp where parallel.sp cuts them, and whole "
        "elsewhere",
        flags="--no-scatter-gather-tensors-in-pipeline!",
    ),
    FlagGroup(
        verdict="explained",
        effect="none",
        reason="scores are not divided by the layer's number, which changed the range of fp16 and "
        "not the result",
        flags="--apply-query-key-layer-scaling!",
    ),
    FlagGroup(
        verdict="explained",
        effect="none",
        reason=(
            "the kernel of each operation is chosen by what the machine has, or by the settings "
            "under kernels; what it "
            "computes stays the same. The flag is not followed"
        ),
        flags="""
            --bias-gelu-fusion! --cross-entropy-fusion-impl --cross-entropy-loss-fusion!
            --disable-clone-scatter-output-in-embedding! --disable-jit-fuser!
            --fallback-to-eager-attn! --flash-attention-version --fused-residual-rmsnorm!
            --no-bias-dropout-fusion! --no-clone-scatter-output-in-embedding!
            --no-masked-softmax-fusion! --no-persist-layer-norm! --no-scaled-masked-softmax-fusion!
            --scaled-upper-triang-masked-softmax-fusion --transformer-impl --use-flash-attn!
            --use-fused-weighted-squared-relu! --use-grouped-gemm-for-dense-mlp!
            --use-te-activation-func! --use-transformer-engine-op-fuser!
        """,
    ),
    FlagGroup(
        verdict="explained",
        effect="none",
        reason="the backend follows the device: NCCL beside gloo on GPUs, gloo on CPUs; groups are "
        "made at the start",
        flags="--disable-gloo-process-groups! --distributed-backend --lazy-mpu-init",
    ),
    FlagGroup(
        verdict="explained",
        effect="none",
        reason=(
            "each rank reads samples a step ahead from mapped files, without worker processes; one "
            "rank builds the indices. The flag is not followed"
        ),
        flags="""
            --data-impl --dataloader-defer-npy-index-mmap! --dataloader-fast-cache-load!
            --mmap-warmup! --num-dataset-builder-threads --num-workers --per-dataset-sequences-path
        """,
    ),
    FlagGroup(
        verdict="explained",
        effect="none",
        reason=(
            "first weights are drawn once for each parameter, whatever rank holds it; Megatron "
            "draws others on each "
            "data-parallel rank and then sends those of the first"
        ),
        flags="--data-parallel-random-init!",
    ),
    FlagGroup(
        verdict="explained",
        effect="none",
        reason="TensorBoard is written with metrics.jsonl, every train.log_every steps",
        flags="--tensorboard-log-interval --tensorboard-queue-size",
    ),
    FlagGroup(
        verdict="explained",
        effect="none",
        reason="Hugging Face tokenizers are read from their own files in one way, the fast one's, "
        "with the same tokens",
        flags="--tokenizer-hf-no-use-fast!",
    ),
    FlagGroup(
        verdict="explained",
        effect="none",
        reason=(
            "the schedule decides when gradients of weights are computed, with the same numbers: "
            "parallel.pipeline.schedule=zb-h1, zb-v or dualpipe-v moves them into the bubble"
        ),
        flags="--defer-embedding-wgrad-compute! --delay-wgrad-compute! --wgrad-deferral-limit",
    ),
    FlagGroup(
        verdict="explained",
        effect="none",
        reason="main weights and gradients of sharded parameters are fp32, whatever travels",
        flags="--megatron-fsdp-grad-comm-dtype --megatron-fsdp-main-grads-dtype "
        "--megatron-fsdp-main-params-dtype",
    ),
    FlagGroup(
        verdict="explained",
        effect="none",
        reason="the loss is computed in fp32, which is more exact",
        flags="--fp16-lm-cross-entropy!",
    ),
    FlagGroup(
        verdict="explained",
        effect="none",
        reason="SIGTERM and SIGINT always save and end the run with code 75; run the same command "
        "again to go on",
        flags="""
            --exit-signal --exit-signal-handler! --exit-signal-handler-for-dataloader!
            --exit-signal-handler-for-training!
        """,
    ),
    FlagGroup(
        verdict="explained",
        effect="none",
        reason="a global batch that does not divide is refused, with the sizes that do",
        flags="--decrease-batch-size-if-needed!",
    ),
    FlagGroup(
        verdict="explained",
        effect="none",
        reason="weights are always initialized, then replaced by what a checkpoint holds",
        flags="--no-initialization!",
    ),
    FlagGroup(
        verdict="explained",
        effect="none",
        reason="a resumed run takes a changed learning rate or length from its config, and lists "
        "the change",
        flags="""
            --override-lr-scheduler! --override-opt-param-scheduler! --override-opt_param-scheduler!
            --use-checkpoint-lr-scheduler! --use-checkpoint-opt-param-scheduler!
            --use-checkpoint-opt_param-scheduler!
        """,
    ),
    FlagGroup(
        verdict="explained",
        effect="none",
        reason="a run without a checkpoint in its folder starts from the first step, and says so",
        flags="--exit-on-missing-checkpoint!",
    ),
    FlagGroup(
        verdict="explained",
        effect="none",
        reason="checkpoints hold no random state: every draw follows from the seed and from what "
        "it is for",
        flags="--no-save-rng!",
    ),
    FlagGroup(
        verdict="explained",
        effect="none",
        reason=(
            "checkpoints have one format, which holds everything a resumed run needs: "
            "torch.distributed.checkpoint files and a manifest"
        ),
        flags="""
            --auto-detect-ckpt-format! --ckpt-drop-redundant-extra-state! --ckpt-format
            --disable-save-tokenizer-assets! --disable-strict-fsdp-dtensor-load! --dist-ckpt-format
            --dist-ckpt-save-pre-mcore-014! --dist-ckpt-strictness --no-save-tokenizer-assets!
            --no-strict-fsdp-dtensor-load! --save-tokenizer-assets! --strict-fsdp-dtensor-load!
            --verify-integrity!
        """,
    ),
    FlagGroup(
        verdict="explained",
        effect="none",
        reason=(
            "a gradient that is not finite skips the step or ends the run (optim.nonfinite_grad); "
            "spikes are yours to see in metrics.jsonl"
        ),
        flags="--check-for-large-grads! --check-for-spiky-loss!",
    ),
)
