"""Megatron's flags that wait for a feature here, sorted by what is missing without it."""

from megalith.megatron.table import FlagGroup

# speed, memory and logs
LATER = (
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason=(
            "not yet: dividing optimizer states over replicas of a sharded model, too. The numbers "
            "are the same; each "
            "replica holds them once"
        ),
        flags="--enable-full-sharding-in-hsdp! --outer-dp-sharding-strategy=no_shard",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="not yet: as many context-parallel ranks as each row needs. The numbers are "
        "the same",
        flags="""
            --create-all-gather-group! --hybrid-context-parallel! --max-seqlen-per-cp-rank
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason=(
            "not yet: keeping parts of layers or optimizer states in host memory; offload.layers "
            "sends whole layers. "
            "The numbers are the same"
        ),
        flags="""
            --activation-offload-fraction --cpu-offloading-retain-pinned-cpu-buffers!
            --delay-offload-until-cuda-graph! --delta-offload-bytes-across-pp-ranks
            --fine-grained-activation-offloading! --fine-grained-offloading-max-inflight-offloads
            --min-offloaded-tensor-size --no-pin-cpu-grads! --no-pin-cpu-params! --offload-modules
            --offload-optimizer-states! --optimizer-cpu-offload! --optimizer-offload-fraction
            --overlap-cpu-optimizer-d2h-h2d! --use-torch-optimizer-for-cpu-offload!
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="not yet: CUDA graphs. The numbers are the same",
        flags="""
            --cuda-graph-impl --cuda-graph-modules --cuda-graph-scope --cuda-graph-warmup-steps
            --enable-cuda-graph! --external-cuda-graph! --inference-rng-tracker!
            --optimizer-cuda-graph! --te-rng-tracker!
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason=(
            "not yet: other ways for tensor-parallel products to overlap their communication than "
            "parallel.tp_comm_overlap. The "
            "numbers are the same"
        ),
        flags="""
            --disable-symmetric-registration! --disable-tp-comm-bulk-dgrad!
            --disable-tp-comm-bulk-wgrad! --disable-tp-comm-overlap-ag!
            --disable-tp-comm-overlap-rs! --no-tp-comm-bulk-dgrad! --no-tp-comm-bulk-wgrad!
            --disable-tp-comm-split-ag! --disable-tp-comm-split-rs! --gtp-remat-nccl-ub!
            --gtp-remat-opt-in-modules --gtp-remat-reduce-scatter-with-fp32-accumulation! --nccl-ub!
            --no-tp-comm-overlap-ag! --no-tp-comm-overlap-rs! --no-tp-comm-split-ag!
            --no-tp-comm-split-rs! --tensor-parallel-num-weight-shards --tp-comm-bootstrap-backend
            --tp-comm-overlap-cfg --tp-comm-overlap-rs-dgrad! --use-nccl-ub!
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason=(
            "not yet: settings of NCCL, SHARP and other transports. NCCL's own variables "
            "(NCCL_...) in the environment "
            "still apply"
        ),
        flags="""
            --ddp-pad-buckets-for-high-nccl-busbw! --high-priority-stream-groups
            --initialize-socket-comms! --nccl-communicator-config-path
            --pipeline-model-parallel-comm-backend --sharp-enabled-group --use-ring-exchange-p2p!
            --use-sharp!
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="not yet: another timeout after the first step; parallel.timeout_seconds is that of "
        "the whole run",
        flags="--distributed-timeout-seconds-after-init",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason=(
            "not yet: other times at which stages start to sum gradients, gather weights or send "
            "than parallel.overlap "
            "has. The numbers are the same"
        ),
        flags="""
            --align-grad-reduce! --align-param-gather! --delay-param-gather!
            --disable-align-grad-reduce! --no-align-grad-reduce! --no-align-param-gather!
            --overlap-p2p-communication-warmup-flush! --overlap-param-gather-with-optimizer-step!
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="not yet: buffers and units of Megatron FSDP; those of parallel.zero=3 are planned "
        "here",
        flags="""
            --fsdp-db-use-persist-buf-on-alloc-fail! --fsdp-double-buffer!
            --fsdp-manual-registration! --megatron-fsdp-enable-fine-grained-param-gather!
            --megatron-fsdp-max-pool-double-buffer! --megatron-fsdp-version
            --no-use-layer-wise-param-layout! --suggested-communication-unit-size
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="not yet: another library that splits text into tokens; the tokenizer's own is used",
        flags="--use-gigatoken!",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="`megalith verify` proves a layout on this machine without its ranks",
        flags="--fake-process-group!",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="not yet: checkpoints written in the background, cached plans, and copies on local "
        "disks",
        flags="""
            --async-ckpt-cpu-priority --async-ckpt-io-priority --async-ckpt-use-cpu-shm!
            --async-save! --async-strategy --ckpt-assume-constant-structure!
            --ckpt-fully-parallel-load! --ckpt-fully-parallel-load-exchange-algo
            --ckpt-fully-parallel-load-per-rank-objects! --ckpt-fully-parallel-load-process-group
            --ckpt-fully-parallel-save-process-group --ckpt-pg-tensors-cache-create!
            --ckpt-pg-tensors-cache-path --disable-ckpt-load-validate-sharding-integrity!
            --disable-stream-ckpt-dequant! --dist-ckpt-workers --no-ckpt-fully-parallel-save!
            --no-ckpt-load-validate-sharding-integrity! --no-stream-ckpt-dequant!
            --non-persistent-ckpt-type --non-persistent-global-ckpt-dir
            --non-persistent-local-ckpt-algo --non-persistent-local-ckpt-dir
            --non-persistent-save-interval --replication! --replication-factor --replication-jump
            --use-persistent-ckpt-worker!
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason=(
            "not yet: watching ranks, restarting in place and injecting faults; a dead rank ends "
            "the run, and the "
            "same command resumes it"
        ),
        flags="""
            --adlr-autoresume! --adlr-autoresume-interval --calc-ft-timeouts!
            --check-weight-hash-across-dp-replicas-interval
            --disable-flight-recorder-dump-on-timeout! --disable-flight-recorder-extra-dump-on-exec!
            --disable-flight-recorder-include-only-active! --disable-straggler-on-startup!
            --enable-ft-package! --error-injection-rate --error-injection-type
            --fault-injector-delay-start-iteration --fault-injector-fault-delay
            --fault-injector-fault-probabilities --fault-injector-fault-types
            --fault-injector-mtti-seconds --fault-injector-num-ranks --fault-injector-offset-seconds
            --fault-injector-ranks --fault-injector-seed --flight-recorder-dump-path
            --flight-recorder-include-stack-trace! --flight-recorder-trace-buffer-size
            --ft-num-warmup-iters --gpu-sniff-test-interval --inprocess-active-world-size
            --inprocess-barrier-timeout --inprocess-completion-timeout --inprocess-empty-cuda-cache!
            --inprocess-granularity --inprocess-hard-timeout --inprocess-heartbeat-interval
            --inprocess-heartbeat-timeout --inprocess-last-call-wait --inprocess-max-iterations
            --inprocess-monitor-process-interval --inprocess-monitor-thread-interval
            --inprocess-progress-watchdog-interval --inprocess-restart! --inprocess-soft-timeout
            --inprocess-termination-grace-time --log-straggler!
            --no-flight-recorder-dump-on-timeout! --no-flight-recorder-extra-dump-on-exec!
            --no-flight-recorder-include-only-active! --rerun-mode
            --result-rejected-tracker-filename --run-workload-inspector-server!
            --straggler-ctrlr-port --straggler-minmax-count
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="not logged here yet; see metrics.jsonl for what is",
        flags="""
            --config-logger-dir --disable-log-loss-scale-to-tensorboard!
            --log-batch-size-to-tensorboard! --log-device-memory-used! --log-energy!
            --log-max-attention-logit! --log-memory-interval --log-memory-to-tensorboard!
            --log-params-norm! --log-progress! --log-timers-to-tensorboard!
            --log-validation-ppl-to-tensorboard! --log-world-size-to-tensorboard! --logging-level
            --no-barrier-with-level-1-timing! --no-log-learnig-rate-to-tensorboard!
            --no-log-loss-scale-to-tensorboard! --otel-enabled! --otel-service-name
            --otel-span-groups --output-logit-dtype --save-activations-interval
            --save-dgrads-interval --save-params-interval --save-wgrads-interval --timing-log-level
            --timing-log-option
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="not yet: Weights & Biases; metrics.jsonl, TensorBoard and plots are written",
        flags="--wandb-entity --wandb-exp-name --wandb-project --wandb-save-dir",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="belongs to a logger inside NVIDIA",
        flags="""
            --app-tag-run-name --app-tag-run-version --enable-one-logger! --no-one-logger!
            --one-logger-async! --one-logger-entity --one-logger-project --one-logger-run-name
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="not yet: profiling of a run",
        flags="""
            --memory-snapshot-path --nvtx-ranges! --profile! --profile-ranks --profile-step-end
            --profile-step-start --pytorch-profiler-collect-callstack!
            --pytorch-profiler-collect-chakra! --pytorch-profiler-collect-shapes!
            --record-memory-history! --record-shapes! --use-pytorch-profiler!
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="not yet: a promise of equal bits on GPUs; on one kind of CPU it holds",
        flags="--deterministic-mode!",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="memory and rounding are left to torch",
        flags="""
            --disable-bf16-reduced-precision-matmul! --disable-manual-gc-eval!
            --empty-unused-memory-level --enable-autocast! --manual-gc! --manual-gc-interval
            --no-manual-gc-eval! --train-sync-interval
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="not yet: data in object stores. Use a path that this machine can read",
        flags="--disable-msc! --enable-msc! --object-storage-cache-path --s3-cache-path",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason=(
            "use --exit-duration-in-mins, or a smaller --train-iters: a longer run goes on where a "
            "shorter one ended"
        ),
        flags="--exit-interval",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="says only how the run is tested",
        flags="--start-eval-at-iter --test-mode! --validation-set-names",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="the tokenizer is read from its own files: see --tokenizer-type",
        flags="""
            --disable-tokenizer-sentencepiece-ignore-extra-whitespaces! --legacy-tokenizer!
            --no-tokenizer-sentencepiece-ignore-extra-whitespaces! --tokenizer-metadata
            --tokenizer-sentencepiece-legacy!
            --tokenizer-special-tokens --trust-remote-code!
        """,
    ),
)

# the digits of the loss
NUMBERS = (
    FlagGroup(
        verdict="not mapped",
        effect="numbers",
        reason="not yet: a batch size that changes during the run. Use one --global-batch-size",
        flags="--rampup-batch-size --step-batch-size-schedule",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="numbers",
        reason=(
            "not yet: embeddings in fp32 beside bf16 matrices. The optimizer keeps fp32 master "
            "weights of "
            "all weights"
        ),
        flags="--embedding-weights-in-fp32!",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="numbers",
        reason="not yet: 8-bit and 4-bit matrix products. bf16 takes their place",
        flags="""
            --fp4-format --fp8-e4m3! --fp8-format --fp8-hybrid! --kitchen-attention-backend
            --kitchen-config-file --kitchen-recipe-number --te-precision-config-file
            --use-kitchen-attention!
        """,
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="is read with 8-bit or 4-bit products only",
        flags="""
            --disable-fp8-wgrad! --first-last-layers-bf16! --fp4-param-gather!
            --fp4-quantizer-factory --fp4-recipe --fp8-amax-compute-algo --fp8-amax-history-len
            --fp8-interval --fp8-margin --fp8-output-proj! --fp8-param-gather!
            --fp8-quantizer-factory --fp8-recipe --keep-fp8-transpose-cache!
            --keep-fp8-transpose-cache-when-using-custom-fsdp! --no-fp8-wgrad!
            --num-layers-at-end-in-bf16 --num-layers-at-start-in-bf16
            --reuse-grad-buf-for-mxfp8-param-ag! --tp-only-amax-red!
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="numbers",
        reason="not yet: optimizer states of other formats. All are fp32 here",
        flags="--exp-avg-dtype=fp32 --exp-avg-sq-dtype=fp32 --main-grads-dtype=fp32 "
        "--main-params-dtype=fp32",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="optimizer states are fp32 unless their formats are named",
        flags="--use-precision-aware-optimizer!",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="numbers",
        reason="not yet: steps that are read and left out",
        flags="--iterations-to-skip",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="numbers",
        reason="not yet: orders of samples that change during the run",
        flags="--phase-transition-iterations --renormalize-blend-weights!",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="numbers",
        reason="not yet: evaluating whole or several validation sets, or in batches of their own. "
        "Training is the same",
        flags="--eval-global-batch-size --eval-micro-batch-size --full-validation! "
        "--multiple-validation-sets!",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="numbers",
        reason="not yet: clipping queries and keys by their largest score",
        flags="--qk-clip!",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="numbers",
        reason="the null tokenizer ends documents with its last id",
        flags="--null-tokenizer-eod-id",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="numbers",
        switch="--load",
        reason=(
            "not yet: Megatron's checkpoint folders. Convert the model to Hugging Face and set "
            "checkpoint.load to "
            "that folder; of a run here, name the folder of a step"
        ),
        flags="--ckpt-step --load-main-params-from-ckpt! --load-model-opt-format! "
        "--override-ckpt-iteration",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="numbers",
        switch="--load",
        reason=(
            "not yet: Megatron's checkpoint folders. Of a run here, checkpoint.load and "
            "checkpoint.load_mode=progress go on "
            "at its step with a new optimizer"
        ),
        flags="--no-load-optim!",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="nothing random is loaded: every draw follows from the seed and from what it is for",
        flags="--no-load-rng!",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="is read with --qk-clip only",
        flags="--qk-clip-alpha --qk-clip-threshold",
    ),
)

# the network, its data or its first weights
MODEL = (
    FlagGroup(
        verdict="explained",
        effect="none",
        reason="the projections down to short vectors are computed apart, with the same result",
        flags="--mla-down-proj-fusion!",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="not yet: linear and sparse attention. Remove it",
        flags="--experimental-attention-variant --linear-attention-type",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="is read with --experimental-attention-variant only",
        flags="""
            --disable-dsa-indexer-rotate-activation! --disable-dsa-indexer-scoring-relu!
            --dsa-indexer-head-dim --dsa-indexer-k-norm-epsilon --dsa-indexer-k-norm-fp32!
            --dsa-indexer-loss-coeff --dsa-indexer-n-heads --dsa-indexer-rope-interleaved!
            --dsa-indexer-skip-topk-offset --dsa-indexer-topk --dsa-indexer-topk-freq
            --dsa-indexer-use-sparse-loss! --dsa-kernel-backend --gdp-cutedsl-kernel!
            --gdp-num-chunk-states-to-recompute --gdp-num-householder --linear-attention-freq
            --linear-conv-kernel-dim --linear-key-head-dim --linear-num-key-heads
            --linear-num-value-heads --linear-value-head-dim --no-dsa-indexer-rotate-activation!
            --no-dsa-indexer-scoring-relu!
        """,
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="the pairs where yarn begins and ends are rounded to whole numbers unless that is "
        "turned off",
        flags="--yarn-correction-range-round-to-int!",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="not yet: several residual streams, or norms in other places. Remove it",
        flags="--apply-residual-connection-post-layernorm! --enable-mhc-connections!",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="is read with --enable-mhc-connections only",
        flags="""
            --mhc-init-gating-factor --mhc-num-residual-streams --mhc-recompute-layer-num
            --mhc-sinkhorn-iterations
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        switch="--mtp-num-layers",
        reason=(
            "not yet: multi-token predictions by a layer that is used again, by layers of other "
            "kinds, "
            "that train nothing "
            "else, or that read mixed hidden states. Remove it"
        ),
        flags="--mtp-detach-heads! --mtp-hsm! --mtp-hybrid-override-pattern "
        "--mtp-use-repeated-layer!",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        switch="--num-experts",
        reason="no part of the numbers: how experts are multiplied and how their messages travel",
        flags="""
            --ep-overlap-early-attn-memory-release! --gtp-expert-remat-nccl-ub!
            --high-priority-a2a-comm-stream! --moe-combine-bwd-dtype --moe-deepep-num-sms
            --moe-dispatch-fwd-dtype --moe-enable-deepep! --moe-expert-rank-capacity-factor
            --moe-flex-dispatcher-backend --moe-flex-dispatcher-num-sms --moe-grouped-gemm!
            --moe-hybridep-num-blocks-permute --moe-hybridep-num-blocks-unpermute
            --moe-hybridep-num-sms --moe-hybridep-num-sms-preprocessing
            --moe-hybridep-pad-uneven-dispatch-inputs! --moe-mlp-glu-interleave-size
            --moe-ncclep-static-shape! --moe-ncclep-zero-copy!
            --moe-pad-experts-for-cuda-graph-inference! --moe-paged-stash!
            --moe-paged-stash-buffer-size-factor-cpu --moe-paged-stash-buffer-size-factor-cuda
            --moe-paged-stash-page-size --moe-permute-fusion! --moe-permute-fusion-into-hybridep!
            --moe-router-fusion! --moe-shared-expert-glu-interleave-size --moe-single-grouped-bias!
            --moe-single-grouped-weight! --moe-use-grouped-tensor! --moe-use-legacy-grouped-gemm!
            --overlap-dispatch-backward-with-experts-wgrad! --use-grouped-gemm-for-shared-expert!
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        switch="--num-experts",
        reason="not yet. Remove it",
        flags="--expert-tensor-parallel-num-weight-shards",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        switch="--num-experts",
        reason=(
            "not yet: it rounds each expert's rows up to what products in 8 or 4 bits take, and "
            "there are none here. "
            "Remove it, together with --fp8-format or --fp4-format: in bf16 experts take any "
            "number of rows"
        ),
        flags="--moe-router-padding-for-fp8! --moe-router-padding-for-quantization!",
    ),
    FlagGroup(
        verdict="explained",
        effect="none",
        switch="--num-experts",
        reason="choices of experts are recorded and replayed by the code that trains, with "
        "`attach_routing`",
        flags="--enable-routing-replay! --moe-enable-routing-replay!",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        switch="--num-experts",
        reason=(
            "upcycling is a command of its own here, and a run begins with what it wrote. Use "
            "`megalith convert DENSE "
            "OUT --upcycle moe.yaml`, set checkpoint.load to OUT, and remove it"
        ),
        flags="--moe-use-upcycling!",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        switch="--moe-use-upcycling",
        reason="the granularity of upcycling is the dense model's ffn_hidden_size by that of an "
        "expert",
        flags="--moe-upcycling-granularity",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="not yet: state-space layers, and modules of your own. Remove it",
        flags="""
            --hybrid-attention-ratio=0 --hybrid-layer-pattern --hybrid-mlp-ratio=0
            --hybrid-override-pattern --is-hybrid-model! --spec
        """,
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="is read with a hybrid pattern only",
        flags="""
            --disable-mamba-mem-eff-path! --mamba-head-dim --mamba-num-groups --mamba-num-heads
            --mamba-state-dim --mamba-training-ssm-states-dtype
        """,
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="is read with another --optimizer only",
        flags="""
            --lion-beta1 --lion-beta2 --muon-coefficient-type --muon-extra-scale-factor
            --muon-fp32-matmul-prec --muon-momentum --muon-nesterov! --muon-no-split-qkv!
            --muon-no-use-nesterov! --muon-num-ns-steps --muon-scalar-optimizer --muon-scale-mode
            --muon-tp-mode --muon-use-nesterov! --muon-use-syrk!
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="not yet: fill-in-the-middle samples. Remove it",
        flags="--fim-data!",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="is read with --fim-data only",
        flags="""
            --fim-eod-token --fim-fragment-rate --fim-middle-token --fim-no-prefix --fim-pad-token
            --fim-prefix-token --fim-rate --fim-split-sample --fim-spm-rate --fim-suffix-token
        """,
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason=(
            "is read with --sft --mock-data only, whose conversations are made up in another way "
            "here; documents can "
            "have lengths of such a distribution, or of a file (data.mock_lengths)"
        ),
        flags="--sft-mock-dataset-config-json",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="not yet: reinforcement learning. Remove it",
        flags="--perform-rl-step!",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="is read with --perform-rl-step only",
        flags="""
            --grpo-clamp-eps-lower --grpo-clamp-eps-upper --grpo-default-temperature
            --grpo-default-top-p --grpo-entropy-term-weight --grpo-filter-groups-with-same-reward!
            --grpo-group-size --grpo-iterations --grpo-kl-beta --grpo-prompts-per-step
            --langrl-env-config --langrl-external-server!
            --langrl-inference-server-conversation-template --langrl-inference-server-type
            --no-langrl-external-server! --no-rl-calculate-intra-group-similarity!
            --no-rl-inference-logprobs-is-correction!
            --no-rl-offload-inference-model-weights-when-idle!
            --no-rl-offload-kv-cache-during-training! --no-rl-partial-rollouts!
            --no-rl-persist-cuda-graphs! --no-rl-remove-kv-cache-during-training!
            --no-rl-reset-cuda-graphs! --no-rl-skip-bos-token! --no-rl-training-cuda-graphs!
            --no-rl-use-sequence-packing! --no-rl-verify-model-weights-swap! --refit-method
            --rl-calculate-intra-group-similarity! --rl-consumption-granularity
            --rl-default-temperature --rl-default-top-k --rl-default-top-p
            --rl-durable-rollout-bank! --rl-generation-batch-size --rl-generation-lag
            --rl-importance-sampling-truncation-coef --rl-inference-expert-model-parallel-size
            --rl-inference-expert-tensor-model-parallel-size --rl-inference-logprobs-is-correction!
            --rl-inference-model-unified-memory-level --rl-inference-parsers
            --rl-inference-pipeline-model-parallel-size --rl-inference-tensor-model-parallel-size
            --rl-kv-cache-management-mode --rl-max-inflight-requests
            --rl-num-parallel-generation-batches --rl-num-parallel-generations
            --rl-offload-inference-model-weights-when-idle! --rl-offload-kv-cache-during-training!
            --rl-offload-optimizer-during-inference! --rl-parallel-generation-tasks
            --rl-partial-rollouts! --rl-persist-cuda-graphs! --rl-profile! --rl-profile-dir
            --rl-prompts-per-eval --rl-remove-kv-cache-during-training! --rl-reset-cuda-graphs!
            --rl-rollout-bank-dir --rl-rollout-bank-max-bytes --rl-sequence-packing-algo
            --rl-sequence-packing-bin-size --rl-sequence-packing-max-sequences-per-bin
            --rl-skip-bos-token! --rl-submission-granularity --rl-training-cuda-graphs!
            --rl-use-sequence-packing! --rl-verify-model-weights-swap!
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="not yet: distillation. Remove it",
        flags="--logits-load-dir",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="not yet: distillation; the training itself is the same",
        flags="--logits-save-dir",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="is read with --logits-load-dir or --logits-save-dir only",
        flags="""
            --logits-load-decode-threads --logits-load-ignore-errors! --logits-load-kd-loss-alpha
            --logits-load-msc-prefetch-depth --logits-load-prefetch-factor --logits-save-dtype
            --logits-save-top-k --logits-save-top-p --logits-save-top-p-min-k
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="not yet: quantizing, pruning and distilling with NVIDIA ModelOpt. Remove it",
        flags="""
            --ammo-convert-te-to-local-spec! --ammo-load-classic-megatron-to-mcore! --ammo-quant-cfg
            --enable-gpt-oss! --export-default-te-spec! --export-draft-vocab-size
            --export-eagle-algorithm --export-force-local-attention! --export-freeze-mtp
            --export-kd-cfg --export-kd-finalize! --export-kd-teacher-ckpt-format
            --export-kd-teacher-load --export-kd-teacher-model-config --export-kv-cache-quant!
            --export-legacy-megatron! --export-model-type --export-moe-apply-probs-on-input!
            --export-num-eagle-layers --export-num-medusa-heads --export-num-mtp
            --export-offline-model! --export-qk-l2-norm! --export-quant-cfg --export-real-quant-cfg
            --export-te-mcore-model! --finetune-data-split --finetune-hf-dataset
            --freeze-base-for-mtp! --modelopt-enabled! --qad-train-target --teacher-model-config
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="not yet: a run that trains nothing, to write down a teacher's scores. Use "
        "optim.frozen for parts",
        flags="--freeze-all-layers!",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason=(
            "not yet: Megatron's checkpoint folders. Convert the model to Hugging Face and set "
            "checkpoint.load to "
            "that folder"
        ),
        flags="--pretrained-checkpoint",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        switch="--load",
        reason=(
            "not yet: Megatron's checkpoint folders. Convert the model to Hugging Face and set "
            "checkpoint.load to "
            "that folder"
        ),
        flags="--finetune! --use-checkpoint-args! --use-mp-args-from-checkpoint-args!",
    ),
    FlagGroup(
        verdict="already",
        effect="none",
        reason="is read with --use-checkpoint-args only",
        flags="--disable-use-tokenizer-model-from-checkpoint-args! "
        "--no-use-tokenizer-model-from-checkpoint-args!",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="use `megalith evaluate` on a checkpoint instead of a training that skips itself",
        flags="--skip-train!",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="use `megalith convert`: a training does not rewrite checkpoints here",
        flags="--ckpt-convert-format --ckpt-convert-save "
        "--ckpt-convert-update-legacy-dist-opt-format!",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="pass the arguments themselves: a YAML file of Megatron's is not read",
        flags="--yaml-cfg",
    ),
)
