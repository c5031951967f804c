"""Megatron's flags that its GPT training does not read: gone, or read by its other programs."""

from megalith.megatron.table import FlagGroup

# gone from Megatron itself
REMOVED = (
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="removed from Megatron. Use --micro-batch-size and --global-batch-size",
        flags="--batch-size",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="removed from Megatron. Use --lr-warmup-fraction or --lr-warmup-iters",
        flags="--warmup",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="removed from Megatron. Use --tensor-model-parallel-size",
        flags="--model-parallel-size",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="removed from Megatron. Use --recompute-granularity full --recompute-method "
        "uniform, or remove it",
        flags="""
            --activations-checkpoint-method --activations-checkpoint-num-layers
            --checkpoint-activations! --checkpoint-num-layers --distribute-checkpointed-activations!
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="removed from Megatron. Use --pipeline-model-parallel-layout with E|... , or remove "
        "it",
        flags="--standalone-embedding-stage!",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="divides encoders from decoders, which this model does not have. Remove it",
        flags="--pipeline-model-parallel-split-rank",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="removed from Megatron. Use the model of Megatron Core, or remove it",
        flags="--use-legacy-models!",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="removed from Megatron. Use --expert-tensor-parallel-size, or remove it",
        flags="--moe-extended-tp!",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="removed from Megatron. Use --moe-expert-capacity-factor, or remove it",
        flags="--moe-token-dropping!",
    ),
)

# read by other programs
OTHERS = (
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="belongs to serving; training does not read it",
        flags="""
            --batch-boundaries --batch-invariant-backend --batch-invariant-mode!
            --benchmark-profile! --cache-mla-latents! --chat-template
            --coordinator-schedule-output-path --decode-only-cuda-graphs! --disable-chunked-prefill!
            --drain-between-batches! --enable-chunked-prefill! --engine-type --flash-decode!
            --incoming-requests-duration --incoming-requests-per-sec --incoming-requests-per-step
            --inference-batch-times-seqlen-threshold --inference-ckpt-non-strict!
            --inference-coordinator-port --inference-cuda-graph-all-prefills!
            --inference-cuda-graph-max-tokens --inference-cuda-graph-scope
            --inference-disable-ep-consensus! --inference-disable-triton-nvls-kernels!
            --inference-dynamic-batching! --inference-dynamic-batching-async-sched-mode
            --inference-dynamic-batching-block-size
            --inference-dynamic-batching-buffer-guaranteed-fraction
            --inference-dynamic-batching-buffer-overflow-factor
            --inference-dynamic-batching-buffer-size-gb --inference-dynamic-batching-chunk-size
            --inference-dynamic-batching-cuda-graph-max-tokens
            --inference-dynamic-batching-cuda-graph-mixed-prefill-count
            --inference-dynamic-batching-cuda-graph-sizing-distribution
            --inference-dynamic-batching-logprobs-mode
            --inference-dynamic-batching-mamba-memory-ratio
            --inference-dynamic-batching-max-requests
            --inference-dynamic-batching-max-requests-override
            --inference-dynamic-batching-max-tokens --inference-dynamic-batching-max-tokens-override
            --inference-dynamic-batching-num-cuda-graphs
            --inference-dynamic-batching-paused-buffer-size-gb
            --inference-dynamic-batching-prefix-caching!
            --inference-dynamic-batching-prefix-caching-coordinator-policy
            --inference-dynamic-batching-prefix-caching-eviction-policy
            --inference-dynamic-batching-prefix-caching-mamba-gb
            --inference-dynamic-batching-prefix-caching-routing-alpha
            --inference-dynamic-batching-sampling-backend
            --inference-dynamic-batching-track-generated-token-events!
            --inference-dynamic-batching-track-paused-request-events!
            --inference-dynamic-batching-unified-memory-level --inference-fuse-tp-communication!
            --inference-grouped-gemm-backend --inference-logging-step-interval
            --inference-max-batch-size --inference-max-requests --inference-max-seq-length
            --inference-moe-disable-fused-quant-kernels! --inference-moe-token-dispatcher-type
            --inference-repeat-n --inference-shards --inference-text-gen-server-logging!
            --inference-use-synchronous-zmq-collectives! --inference-wandb-logging!
            --mamba-inference-conv-states-dtype --mamba-inference-ssm-states-dtype
            --max-tokens-to-oom --model-provider --moe-routing-trace-max-inference-steps
            --nccl-all-reduce-for-prefill! --no-inference-disable-ep-consensus!
            --no-inference-dynamic-batching-prefix-caching! --no-inference-text-gen-server-logging!
            --no-inference-use-synchronous-zmq-collectives! --no-inference-wandb-logging!
            --no-record-throughput! --num-input-tokens --num-speculative-tokens
            --num-tokens-from-file! --num-tokens-to-generate --num-tokens-to-prompt
            --output-bert-embeddings! --output-every-n-results --output-path
            --output-request-events! --parsers --prompt-file --prompt-file-num-truncate --prompts
            --return-log-probs! --skip-prompt-log-probs! --stop-words --suspend-resume-interval
            --suspend-timeout --symmetric-ar-type --temperature --termination-id
            --throughput-check-only! --top-n-logprobs --top_k --top_p --use-flashinfer-fused-rope!
            --use-legacy-static-engine! --use-same-sampling-seed-across-dp-ranks!
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="belongs to writing text: use `megalith generate --mlp-chunks`, or `megalith chat "
        "--mlp-chunks`",
        flags="--mlp-chunks-for-prefill",
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="belongs to tools/preprocess_data.py: use `megalith prepare`",
        flags="""
            --append-eod! --find-optimal-num-workers! --input --json-keys --keep-newlines!
            --keep-sequential-samples! --lang --max-documents --multimodal! --output-prefix
            --pad-length --partitions --split-sentences! --workers --workers-to-check
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="belongs to tools/checkpoint/convert.py: use `megalith convert`",
        flags="""
            --load-dir --loader --max-queue-size --model-type --no-checking! --save-dir --saver
            --target-expert-parallel-size --target-pipeline-parallel-size
            --target-tensor-parallel-size
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="belongs to BERT or T5; pretrain_gpt.py does not read it",
        flags="""
            --bert-no-binary-head! --decoder-num-layers --decoder-seq-length
            --encoder-pipeline-model-parallel-size --encoder-tensor-model-parallel-size --mask-prob
            --relative-attention-max-distance --relative-attention-num-buckets --short-seq-prob
            --vocab-extra-ids
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="belongs to dense retrieval; pretrain_gpt.py does not read it",
        flags="""
            --bert-embedder-type --bert-load --biencoder-projection-dim
            --biencoder-shared-query-context-model! --block-data-path --embedding-path
            --evidence-data-path --faiss-use-gpu! --ict-head-size --ict-load --indexer-batch-size
            --indexer-log-interval --query-in-block-prob --report-topk-accuracies
            --retriever-report-topk-accuracies --retriever-score-scaling! --retriever-seq-length
            --titles-data-path --use-one-sent-docs!
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="belongs to RETRO; pretrain_gpt.py does not read it",
        flags="""
            --retro-add-retriever! --retro-attention-gate --retro-cyclic-train-iters
            --retro-encoder-attention-dropout --retro-encoder-hidden-dropout --retro-encoder-layers
            --retro-no-verify-neighbor-count! --retro-num-neighbors --retro-num-retrieved-chunks
            --retro-project-dir --retro-return-doc-ids! --retro-workdir
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="none",
        reason="belongs to vision models; pretrain_gpt.py does not read it",
        flags="""
            --classes-fraction --data-per-class-fraction --dino-bottleneck-size
            --dino-freeze-last-layer --dino-head-hidden-size --dino-local-crops-number
            --dino-local-img-size --dino-norm-last-layer! --dino-teacher-temp
            --dino-warmup-teacher-temp --dino-warmup-teacher-temp-epochs --head-lr-mult --img-dim
            --img-h --img-w --iter-per-epoch --mask-factor --mask-type --num-channels --num-classes
            --patch-dim --sample-rate --swin-backbone-type --vision-backbone-type
            --vision-model-type --vision-pretraining! --vision-pretraining-type
        """,
    ),
    FlagGroup(
        verdict="not mapped",
        effect="model",
        reason="belongs to multimodal models, which cannot be translated yet. Remove it",
        flags="""
            --allow-missing-vision-projection-checkpoint! --audio-encoder-model --dataloader-save
            --dataloader-seq-length --dataset-config --dataset-provider
            --disable-vision-class-token! --eos-id --force-system-message! --freeze-LM!
            --freeze-ViT! --hf-assign-unused-tokens --image-seq-length --image-size --image-tag-type
            --image-token-id --language-model-checkpoint --language-model-type --max-num-tiles
            --num-frames --online-evaluation-config --packing-buffer-size --packing-seq-length
            --pad-token-id --pixel-shuffle! --prompt-path --recompute-vision! --special-tokens
            --tokenizer-prompt-format --total-seq-length --use-area-weighted-aspect-ratio!
            --use-loss-scaling! --use-mcore-inference! --use-te! --use-thumbnail! --use-tile-tags!
            --use-tiling!
        """,
    ),
)
