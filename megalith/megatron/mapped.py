"""Megatron's flags that become settings of ours, with the values Megatron assumes when they are
left out.

Defaults are those of the `megatron-core` releases 0.8 to 0.19; where releases disagree, the newest
one's.
"""

from megalith.megatron.table import FlagRow

LAYERS = (
    "model.layers.attention",
    "model.layers.mlp",
    "model.layers.num_kv_heads",
    "model.layers.ffn_hidden_size",
    "model.num_kv_heads",
    "model.ffn_hidden_size",
)
"""What a file of blocks decides."""

MODEL = (
    FlagRow(
        name="--num-layers",
        takes="int",
        fields=("model.num_layers",),
        aliases=("--encoder-num-layers",),
    ),
    FlagRow(name="--hidden-size", takes="int", fields=("model.hidden_size",)),
    FlagRow(name="--num-attention-heads", takes="int", fields=("model.num_heads",)),
    FlagRow(
        name="--group-query-attention",
        takes="nothing",
        fields=("model.num_kv_heads",),
        how="without it every query head has its own key/value head",
    ),
    FlagRow(
        name="--num-query-groups",
        takes="int",
        fields=("model.num_kv_heads",),
        default=1,
        how="read together with --group-query-attention only",
    ),
    FlagRow(
        name="--ffn-hidden-size",
        takes="int",
        fields=("model.ffn_hidden_size",),
        how="left out: 4 times the hidden size; with --swiglu 8/3 of it, rounded down to a "
        "multiple of 64",
    ),
    FlagRow(
        name="--swiglu",
        takes="nothing",
        fields=("model.activation", "model.gated"),
        how="silu, with a gate",
    ),
    FlagRow(
        name="--quick-geglu",
        takes="nothing",
        fields=("model.activation", "model.gated"),
        how="quick_gelu, with a gate",
    ),
    FlagRow(
        name="--squared-relu",
        takes="nothing",
        fields=("model.activation", "model.gated"),
        how="squared_relu, without a gate",
    ),
    FlagRow(
        name="--no-bias-gelu-fusion",
        takes="nothing",
        fields=("model.activation",),
        how="gelu, as without biases; left out: gelu_tanh, which Megatron's fused GELU is",
    ),
    FlagRow(
        name="--activation-func-clamp-value",
        takes="float",
        fields=("model.activation_clamp",),
        how="read where there is a gate",
    ),
    FlagRow(
        name="--glu-linear-offset",
        takes="float",
        fields=("model.up_offset",),
        default=0.0,
        how="read where there is a gate",
    ),
    FlagRow(name="--kv-channels", takes="int", fields=("model.head_dim",)),
    FlagRow(
        name="--normalization",
        takes="choice",
        fields=("model.norm",),
        default="LayerNorm",
        choices=("LayerNorm", "RMSNorm"),
        how="LayerNorm: layer; RMSNorm: rms",
    ),
    FlagRow(name="--apply-layernorm-1p", takes="nothing", fields=("model.zero_centered_gamma",)),
    FlagRow(
        name="--qk-layernorm",
        takes="nothing",
        fields=("model.attention.qk_norm",),
        how="head; with latent attention its short vectors are normed, and without the flag "
        "model.mla.norms is false",
    ),
    FlagRow(
        name="--attention-backend",
        takes="choice",
        fields=("kernels.attention",),
        default="auto",
        choices=("flash", "fused", "unfused", "local", "auto"),
        how="unfused and local: reference; the others leave it at auto",
    ),
    FlagRow(name="--no-rope-fusion", takes="nothing", fields=("kernels.rope",), how="torch"),
    FlagRow(
        name="--no-bias-swiglu-fusion",
        takes="nothing",
        fields=("kernels.activation",),
        how="torch, with --swiglu",
    ),
    FlagRow(name="--qk-l2-norm", takes="nothing", fields=("model.attention.qk_norm",), how="l2"),
    FlagRow(name="--attention-output-gate", takes="nothing", fields=("model.attention.gated",)),
    FlagRow(
        name="--softmax-type",
        takes="choice",
        fields=("model.attention.sinks", "model.attention.off_by_one"),
        default="vanilla",
        choices=("vanilla", "learnable", "off-by-one"),
        how="learnable: sinks; off-by-one: off_by_one",
    ),
    FlagRow(
        name="--window-size",
        takes="text",
        fields=("model.attention.window",),
        how="the first number and one more, because the token itself counts here",
    ),
    FlagRow(
        name="--window-attn-skip-freq",
        takes="text",
        fields=("model.attention.window_layers",),
        how="a pattern that repeats; a number counts to the layer without a window",
    ),
    FlagRow(
        name="--multi-latent-attention",
        takes="nothing",
        fields=("model.rope.interleaved", "model.mla.norm_eps", "model.mla.norms"),
        how="with the sizes below; its vectors are normed by --norm-epsilon, its positions turn "
        "neighbors",
    ),
    FlagRow(name="--kv-lora-rank", takes="int", fields=("model.mla.kv_rank",), default=32),
    FlagRow(name="--q-lora-rank", takes="int", fields=("model.mla.q_rank",)),
    FlagRow(name="--qk-head-dim", takes="int", fields=("model.mla.nope_dim",), default=128),
    FlagRow(name="--qk-pos-emb-head-dim", takes="int", fields=("model.mla.rope_dim",), default=64),
    FlagRow(name="--v-head-dim", takes="int", fields=("model.mla.value_dim",), default=128),
    FlagRow(
        name="--rope-type",
        takes="choice",
        fields=("model.rope.scaling", "model.rope.original_max_position"),
        default="yarn",
        choices=("rope", "yarn"),
        how="of latent attention; yarn: from 4096 tokens, where --rotary-scaling-factor is above 1",
    ),
    FlagRow(
        name="--rotary-scaling-factor",
        takes="float",
        fields=("model.rope.factor",),
        default=1.0,
        how="with yarn",
    ),
    FlagRow(
        name="--mscale",
        takes="float",
        fields=("model.rope.attention_factor",),
        default=1.0,
        how="with yarn; the ratio of what it gives and what --mscale-all-dim gives",
    ),
    FlagRow(
        name="--mscale-all-dim",
        takes="float",
        fields=("model.rope.attention_factor", "model.mla.yarn_mscale"),
        default=0.0,
        how="the latter in latent attention only, and unset where it is 0; model.attention.scale "
        "with --rope-type rope",
    ),
    FlagRow(
        name="--yarn-original-max-position-embeddings",
        takes="int",
        fields=("model.rope.original_max_position",),
        default=4096,
        how="read with --position-embedding-type yarn only, as the three below",
    ),
    FlagRow(name="--yarn-beta-fast", takes="float", fields=("model.rope.beta_fast",), default=32.0),
    FlagRow(name="--yarn-beta-slow", takes="float", fields=("model.rope.beta_slow",), default=1.0),
    FlagRow(
        name="--no-yarn-correction-range-round-to-int",
        takes="nothing",
        fields=("model.rope.whole_pairs",),
        how="false",
    ),
    FlagRow(
        name="--mrope-section",
        takes="words",
        fields=("model.rope.sections",),
        how="read with --position-embedding-type mrope only",
    ),
    FlagRow(name="--mtp-num-layers", takes="int", fields=("model.mtp.num_layers",)),
    FlagRow(
        name="--mtp-loss-scaling-factor",
        takes="float",
        fields=("model.mtp.loss_weight",),
        default=0.1,
        how="read with --mtp-num-layers only",
    ),
    FlagRow(
        name="--mtp-standalone",
        takes="nothing",
        fields=("parallel.pipeline.layout",),
        how="the layout decides, as in Megatron: a stage with m and nothing else",
    ),
    FlagRow(
        name="--attention-dropout", takes="float", fields=("model.dropout.attention",), default=0.1
    ),
    FlagRow(
        name="--hidden-dropout",
        takes="float",
        fields=("model.dropout.embedding", "model.dropout.residual"),
        default=0.1,
    ),
    FlagRow(
        name="--max-position-embeddings",
        takes="int",
        fields=("model.max_seq_len",),
        how="how far the model is meant to read; learned positions have a table of so many rows",
    ),
    FlagRow(
        name="--norm-epsilon",
        takes="float",
        fields=("model.norm_eps",),
        default=1e-5,
        aliases=("--layernorm-epsilon",),
    ),
    FlagRow(
        name="--position-embedding-type",
        takes="choice",
        fields=("model.positions", "model.rope.scaling"),
        default="learned_absolute",
        choices=("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
        how="rope; learned_absolute: learned; none; yarn: rope, scaled; mrope: rope, in sections; "
        "relative is refused, "
        "because Megatron's GPT then has no positions",
    ),
    FlagRow(
        name="--use-rotary-position-embeddings",
        takes="nothing",
        fields=("model.positions",),
        how="the old spelling of --position-embedding-type rope",
    ),
    FlagRow(name="--rotary-base", takes="float", fields=("model.rope.theta",), default=10_000.0),
    FlagRow(name="--rotary-percent", takes="float", fields=("model.rope.fraction",), default=1.0),
    FlagRow(name="--rotary-interleaved", takes="nothing", fields=("model.rope.interleaved",)),
    FlagRow(
        name="--rotary-seq-len-interpolation-factor",
        takes="float",
        fields=("model.rope.scaling", "model.rope.factor"),
        how="linear, by this factor",
    ),
    FlagRow(
        name="--no-rope-freq",
        takes="text",
        fields=("model.rope.skip",),
        how="a pattern that repeats; a number counts to the layer without positions",
    ),
    FlagRow(
        name="--use-rope-scaling", takes="nothing", fields=("model.rope.scaling",), how="llama3"
    ),
    FlagRow(
        name="--rope-scaling-factor", takes="float", fields=("model.rope.factor",), default=8.0
    ),
    FlagRow(
        name="--untie-embeddings-and-output-weights",
        takes="nothing",
        fields=("model.tied_embeddings",),
        how="false; left out: true",
    ),
    FlagRow(
        name="--heterogeneous-layers-config-path",
        takes="text",
        fields=LAYERS,
        how="its block_configs; whatever else it says must agree with the other arguments",
    ),
    FlagRow(
        name="--heterogeneous-layers-config-encoded-json",
        takes="text",
        fields=LAYERS,
        how="the same as text, which goes before a file; Megatron's layers are equal unless a file "
        "is named, too",
    ),
    FlagRow(
        name="--disable-bias-linear",
        takes="nothing",
        fields=(
            "model.qkv_bias",
            "model.output_bias",
            "model.mlp_bias",
            "model.moe.biases",
            "model.moe.router.bias",
        ),
        how="false; left out: true, all of them",
    ),
    FlagRow(name="--add-qkv-bias", takes="nothing", fields=("model.qkv_bias",), how="true"),
    FlagRow(name="--init-method-std", takes="float", fields=("model.init_std",), default=0.02),
    FlagRow(
        name="--fp32-residual-connection",
        takes="nothing",
        fields=("model.fp32_residual",),
        how="true",
    ),
    FlagRow(
        name="--embedding-init-method-std",
        takes="float",
        fields=("model.embedding_init_std",),
        how="these tables then do not decay; Megatron's help says so, too, its source of August "
        "2026 lets them decay",
    ),
    FlagRow(
        name="--init-method-xavier-uniform",
        takes="nothing",
        fields=("model.init",),
        how="xavier_uniform",
    ),
    FlagRow(
        name="--use-mup",
        takes="nothing",
        fields=("model.mup.base_hidden_size",),
        how="with the six below",
    ),
    FlagRow(name="--mup-base-hidden-size", takes="int", fields=("model.mup.base_hidden_size",)),
    FlagRow(
        name="--mup-width-mult",
        takes="float",
        fields=("model.mup.base_hidden_size",),
        default=1.0,
        how="the hidden size divided by it, without --mup-base-hidden-size",
    ),
    FlagRow(name="--mup-base-head-dim", takes="int", fields=("model.mup.base_head_dim",)),
    FlagRow(
        name="--mup-attn-scale-power",
        takes="float",
        fields=("model.mup.attention_scale_power",),
        default=1.0,
    ),
    FlagRow(
        name="--mup-embedding-mult", takes="float", fields=("model.embedding_scale",), default=1.0
    ),
    FlagRow(
        name="--mup-output-mult",
        takes="float",
        fields=("model.logit_scale",),
        default=1.0,
        how="times the width, by which muP divides here; 1 is 1 / width in Megatron, too",
    ),
    FlagRow(
        name="--make-vocab-size-divisible-by",
        takes="int",
        fields=("model.pad_vocab_to_multiple_of",),
        default=128,
        how="times --tensor-model-parallel-size, as Megatron pads",
    ),
    FlagRow(
        name="--no-pad-vocab-size",
        takes="nothing",
        fields=("model.pad_vocab_to_multiple_of",),
        aliases=("--disable-pad-vocab-size",),
        how="1",
    ),
    FlagRow(
        name="--padded-vocab-size",
        takes="int",
        fields=("model.pad_vocab_to_multiple_of",),
        how="this many rows, so that the table has exactly them",
    ),
)

TOKENS = (
    FlagRow(
        name="--vocab-size",
        takes="int",
        fields=("model.vocab_size", "tokenizer.vocab_size"),
        how="left out: read from the tokenizer's files",
    ),
    FlagRow(
        name="--tokenizer-type",
        takes="choice",
        fields=("tokenizer.kind",),
        default="GPT2BPETokenizer",
        choices=(
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "GPT2BPETokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "HuggingFaceTokenizer",
            "Llama2Tokenizer",
            "Llama3Tokenizer",
            "MistralTokenizer",
            "TikTokenizer",
            "MultimodalTokenizer",
            "NullTokenizer",
            "NullMultimodalTokenizer",
            "SFTTokenizer",
        ),
        how="HuggingFaceTokenizer, GPT2BPETokenizer, SFTTokenizer: huggingface; "
        "SentencePieceTokenizer, "
        "GPTSentencePieceTokenizer, Llama2Tokenizer: sentencepiece; TikTokenizer: tiktoken; "
        "NullTokenizer: null",
    ),
    FlagRow(
        name="--tiktoken-pattern",
        takes="choice",
        fields=("tokenizer.pattern",),
        default="v2",
        choices=("v1", "v2"),
    ),
    FlagRow(
        name="--tiktoken-num-special-tokens",
        takes="int",
        fields=("tokenizer.num_special_tokens",),
        default=1000,
    ),
    FlagRow(name="--tiktoken-special-tokens", takes="words", fields=("tokenizer.special_tokens",)),
    FlagRow(name="--tokenizer-model", takes="text", fields=("tokenizer.path",)),
    FlagRow(
        name="--vocab-file", takes="text", fields=("tokenizer.path",), how="of GPT2BPETokenizer"
    ),
    FlagRow(
        name="--merge-file",
        takes="text",
        fields=("tokenizer.path",),
        how="must lie beside the vocabulary",
    ),
    FlagRow(
        name="--tokenizer-hf-no-include-special-tokens",
        takes="nothing",
        fields=("tokenizer.add_special_tokens",),
        how="false",
    ),
    FlagRow(name="--data-path", takes="words", fields=("data.path",)),
    FlagRow(name="--train-data-path", takes="words", fields=("data.train_path",)),
    FlagRow(name="--valid-data-path", takes="words", fields=("data.valid_path",)),
    FlagRow(name="--test-data-path", takes="words", fields=("data.test_path",)),
    FlagRow(name="--mock-data", takes="nothing", fields=("data.mock",)),
    FlagRow(
        name="--sft",
        takes="nothing",
        fields=(
            "data.sft.path",
            "data.sft.valid_path",
            "data.sft.mock_conversations",
            "data.sft.packing",
            "data.sft.shuffle",
            "data.sft.overlong",
        ),
        how="the data paths are files of conversations; rows as Megatron fills them: row, none, "
        "truncate",
    ),
    FlagRow(
        name="--sft-tokenizer-prompt-format",
        takes="text",
        fields=("data.sft.template", "data.sft.loss_on"),
        default="nemotron-h-aligned",
        how="nemotron-h-aligned, nemotron-nano-v2; identity, with an end token; default: the "
        "tokenizer's own template, "
        "and all is learned; others need a Jinja file",
    ),
    FlagRow(
        name="--sequence-packing-scheduler",
        takes="text",
        fields=("train.tokens_per_microbatch",),
        how="dp_balanced, with --sft: conversations are packed step by step, and ranks get work "
        "that costs alike",
    ),
    FlagRow(
        name="--max-seqlen-per-dp-cp-rank",
        takes="int",
        fields=("train.tokens_per_microbatch",),
        how="with --sequence-packing-scheduler dp_balanced",
    ),
    FlagRow(
        name="--split",
        takes="text",
        fields=("data.split",),
        how="left out: 969,30,1, as in Megatron",
    ),
    FlagRow(name="--data-cache-path", takes="text", fields=("data.cache_path",)),
    FlagRow(name="--no-mmap-bin-files", takes="nothing", fields=("data.mmap",), how="false"),
    FlagRow(
        name="--mid-level-dataset-surplus",
        takes="float",
        fields=("data.mid_level_dataset_surplus",),
        default=0.005,
    ),
    FlagRow(name="--eod-mask-loss", takes="nothing", fields=("data.eod_mask_loss",)),
    FlagRow(
        name="--reset-attention-mask",
        takes="nothing",
        fields=("data.document_masking",),
        how="documents end at end-of-document tokens; positions start again there, too",
    ),
    FlagRow(
        name="--reset-position-ids",
        takes="nothing",
        fields=("data.document_masking",),
        how="together with --reset-attention-mask",
    ),
    FlagRow(
        name="--dataloader-inter-document-masking",
        takes="nothing",
        fields=("data.document_masking",),
    ),
    FlagRow(
        name="--dataloader-type",
        takes="choice",
        fields=("data.sampler",),
        default="single",
        choices=("single", "cyclic", "external"),
        how="single: sequential; cyclic: cyclic_per_rank",
    ),
    FlagRow(
        name="--no-data-sharding",
        takes="nothing",
        fields=("data.sampler",),
        how="together with --dataloader-type cyclic: cyclic",
    ),
)

STEPS = (
    FlagRow(
        name="--seq-length",
        takes="int",
        fields=("train.seq_len",),
        aliases=("--encoder-seq-length",),
    ),
    FlagRow(name="--micro-batch-size", takes="int", fields=("train.micro_batch_size",)),
    FlagRow(
        name="--global-batch-size",
        takes="int",
        fields=("train.global_batch_size",),
        how="left out: --micro-batch-size times the data-parallel ranks of the job",
    ),
    FlagRow(name="--train-iters", takes="int", fields=("train.steps",)),
    FlagRow(
        name="--train-samples",
        takes="int",
        fields=("train.steps", "data.num_train_samples"),
        how="divided by the global batch, rounded down; the order of samples is built for all of "
        "them",
    ),
    FlagRow(
        name="--eval-interval",
        takes="int",
        fields=("train.eval_every",),
        how="left out or 0: after the last step only (Megatron before 0.19 assumed 1000)",
    ),
    FlagRow(name="--eval-iters", takes="int", fields=("train.eval_steps",), default=100),
    FlagRow(name="--log-interval", takes="int", fields=("train.log_every",), default=100),
    FlagRow(name="--exit-duration-in-mins", takes="float", fields=("train.max_minutes",)),
    FlagRow(name="--seed", takes="int", fields=("seed",), default=1234),
    FlagRow(
        name="--bf16", takes="nothing", fields=("precision.params",), how="bf16; left out: fp32"
    ),
    FlagRow(
        name="--fp16",
        takes="nothing",
        fields=("precision.params", "optim.nonfinite_grad"),
        how="fp16; a step whose gradients overflow is left out",
    ),
    FlagRow(
        name="--initial-loss-scale",
        takes="float",
        fields=("precision.loss_scale.initial",),
        default=2.0**32,
        how="the loss scale is read with --fp16 only",
    ),
    FlagRow(
        name="--min-loss-scale",
        takes="float",
        fields=("precision.loss_scale.min",),
        default=1.0,
        aliases=("--min-scale",),
    ),
    FlagRow(
        name="--loss-scale-window",
        takes="int",
        fields=("precision.loss_scale.window",),
        default=1000,
    ),
    FlagRow(
        name="--hysteresis", takes="int", fields=("precision.loss_scale.hysteresis",), default=2
    ),
    FlagRow(name="--loss-scale", takes="float", fields=("precision.loss_scale.constant",)),
)

OPTIMIZER = (
    FlagRow(
        name="--optimizer",
        takes="choice",
        fields=("optim.kind",),
        default="adam",
        choices=("adam", "sgd", "muon", "dist_muon", "adaptive_muon", "lion", "soap"),
        how="adam: adamw; sgd: sgd",
    ),
    FlagRow(
        name="--sgd-momentum",
        takes="float",
        fields=("optim.momentum",),
        default=0.9,
        how="with --optimizer sgd",
    ),
    FlagRow(name="--lr", takes="float", fields=("schedule.lr",)),
    FlagRow(name="--min-lr", takes="float", fields=("schedule.min_lr",), default=0.0),
    FlagRow(
        name="--lr-decay-style",
        takes="choice",
        fields=("schedule.style",),
        default="linear",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        how="inverse-square-root: inverse_square_root; WSD: wsd",
    ),
    FlagRow(name="--lr-decay-iters", takes="int", fields=("schedule.decay_steps",)),
    FlagRow(
        name="--lr-decay-samples",
        takes="int",
        fields=("schedule.decay_steps",),
        how="divided by the global batch",
    ),
    FlagRow(name="--lr-warmup-iters", takes="int", fields=("schedule.warmup_steps",), default=0),
    FlagRow(
        name="--lr-warmup-samples",
        takes="int",
        fields=("schedule.warmup_steps",),
        how="divided by the global batch",
    ),
    FlagRow(
        name="--lr-warmup-fraction",
        takes="float",
        fields=("schedule.warmup_steps",),
        how="of the length of the decay",
    ),
    FlagRow(name="--lr-warmup-init", takes="float", fields=("schedule.warmup_init",), default=0.0),
    FlagRow(name="--lr-wsd-decay-iters", takes="int", fields=("schedule.wsd_decay_steps",)),
    FlagRow(
        name="--lr-wsd-decay-samples",
        takes="int",
        fields=("schedule.wsd_decay_steps",),
        how="divided by the global batch",
    ),
    FlagRow(
        name="--lr-wsd-decay-style",
        takes="choice",
        fields=("schedule.wsd_decay_style",),
        default="exponential",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    ),
    FlagRow(name="--weight-decay", takes="float", fields=("schedule.weight_decay",), default=0.01),
    FlagRow(
        name="--weight-decay-incr-style",
        takes="choice",
        fields=("schedule.weight_decay_style",),
        default="constant",
        choices=("constant", "linear", "cosine"),
    ),
    FlagRow(name="--start-weight-decay", takes="float", fields=("schedule.weight_decay",)),
    FlagRow(name="--end-weight-decay", takes="float", fields=("schedule.end_weight_decay",)),
    FlagRow(name="--adam-beta1", takes="float", fields=("optim.beta1",), default=0.9),
    FlagRow(name="--adam-beta2", takes="float", fields=("optim.beta2",), default=0.999),
    FlagRow(name="--adam-eps", takes="float", fields=("optim.eps",), default=1e-8),
    FlagRow(
        name="--no-decoupled-weight-decay",
        takes="nothing",
        fields=("optim.decoupled_weight_decay",),
        how="false",
    ),
    FlagRow(
        name="--decoupled-lr",
        takes="float",
        fields=("optim.groups",),
        how="a group of embed.weight and head.weight; logged as lr_embedding_and_output",
    ),
    FlagRow(
        name="--decoupled-min-lr",
        takes="float",
        fields=("optim.groups",),
        how="of that group; left out: --min-lr",
    ),
    FlagRow(
        name="--apply-wd-to-qk-layernorm",
        takes="nothing",
        fields=("optim.decayed_vectors",),
        how="the norms of queries and keys",
    ),
    FlagRow(
        name="--no-weight-decay-cond-type",
        takes="choice",
        fields=("optim.decayed_vectors",),
        choices=("apply_wd_to_qk_layernorm",),
        how="as --apply-wd-to-qk-layernorm",
    ),
    FlagRow(
        name="--dump-param-to-param-group-map",
        takes="place",
        fields=("observe.parameters",),
        how="true: parameters.jsonl in the folder of the run",
    ),
    FlagRow(name="--clip-grad", takes="float", fields=("optim.clip_grad",), default=1.0),
    FlagRow(
        name="--no-check-for-nan-in-loss-and-grad",
        takes="nothing",
        fields=("optim.nonfinite_grad",),
        how="skip; left out: raise, or with --fp16 skip",
    ),
    FlagRow(name="--log-num-zeros-in-grad", takes="nothing", fields=("optim.count_zeros",)),
)

LAYOUT = (
    FlagRow(name="--tensor-model-parallel-size", takes="int", fields=("parallel.tp",), default=1),
    FlagRow(
        name="--sequence-parallel",
        takes="nothing",
        fields=("parallel.sp",),
        how="false when tp is 1, as in Megatron",
    ),
    FlagRow(
        name="--tp-comm-overlap",
        takes="nothing",
        fields=("parallel.tp_comm_overlap",),
        how="true, with sequence parallelism",
    ),
    FlagRow(
        name="--use-tp-pp-dp-mapping",
        takes="nothing",
        fields=("parallel.order",),
        how="tp-cp-ep-pp-dp",
    ),
    FlagRow(
        name="--distributed-timeout-minutes",
        takes="float",
        fields=("parallel.timeout_seconds",),
        default=10.0,
        factor=60.0,
        how="in seconds",
    ),
)

PIPELINE = (
    FlagRow(name="--pipeline-model-parallel-size", takes="int", fields=("parallel.pp",), default=1),
    FlagRow(
        name="--num-virtual-stages-per-pipeline-rank",
        takes="int",
        fields=("parallel.pipeline.vpp",),
        how="more than 1: the schedule is interleaved",
    ),
    FlagRow(
        name="--num-layers-per-virtual-pipeline-stage",
        takes="int",
        fields=("parallel.pipeline.vpp",),
        how="layers of a rank divided by it",
    ),
    FlagRow(
        name="--microbatch-group-size-per-virtual-pipeline-stage",
        takes="int",
        fields=("parallel.pipeline.group",),
        how="with a virtual pipeline; left out: parallel.pp",
    ),
    FlagRow(
        name="--pipeline-model-parallel-layout",
        takes="text",
        fields=("parallel.pipeline.layout", "parallel.pipeline.vpp"),
        how="the same string, m included; vpp is the number of its stages divided by pp",
    ),
    FlagRow(
        name="--decoder-first-pipeline-num-layers",
        takes="int",
        fields=("parallel.pipeline.first_layers",),
    ),
    FlagRow(
        name="--decoder-last-pipeline-num-layers",
        takes="int",
        fields=("parallel.pipeline.last_layers",),
    ),
    FlagRow(
        name="--account-for-embedding-in-pipeline-split",
        takes="nothing",
        fields=("parallel.pipeline.count_embedding",),
    ),
    FlagRow(
        name="--account-for-loss-in-pipeline-split",
        takes="nothing",
        fields=("parallel.pipeline.count_loss",),
    ),
)

CONTEXT = (
    FlagRow(name="--context-parallel-size", takes="int", fields=("parallel.cp",), default=1),
    FlagRow(
        name="--cp-comm-type",
        takes="words",
        fields=("parallel.context.kind", "parallel.context.layers"),
        how="p2p: ring; all_gather: gather; a2a: a2a; a2a+p2p: a2a+ring; one word, or one for each "
        "layer",
    ),
    FlagRow(
        name="--hierarchical-context-parallel-sizes",
        takes="words",
        fields=("parallel.context.a2a",),
        how="the first of the two; the second follows",
    ),
)

EXPERTS = (
    FlagRow(
        name="--num-experts",
        takes="int",
        fields=("model.moe.num_experts",),
        how="left out or 0: no experts",
    ),
    FlagRow(
        name="--moe-ffn-hidden-size",
        takes="int",
        fields=("model.moe.ffn_hidden_size",),
        how="left out: as an MLP",
    ),
    FlagRow(
        name="--moe-layer-freq",
        takes="text",
        fields=("model.moe.layers",),
        how="a pattern that repeats; a number counts to the next layer with experts, from the "
        "first on",
    ),
    FlagRow(name="--moe-router-topk", takes="int", fields=("model.moe.top_k",), default=2),
    FlagRow(
        name="--moe-router-score-function",
        takes="choice",
        fields=("model.moe.router.score",),
        default="softmax",
        choices=("softmax", "sigmoid", "sqrtsoftplus"),
        how="sqrtsoftplus: sqrt_softplus; with one expert per token, these and sigmoid are not "
        "renormalized",
    ),
    FlagRow(
        name="--moe-router-pre-softmax",
        takes="nothing",
        fields=("model.moe.router.norm_topk_prob",),
        how="false; left out: a softmax over the chosen is one over all, renormalized",
    ),
    FlagRow(
        name="--moe-router-topk-scaling-factor",
        takes="float",
        fields=("model.moe.router.routed_scaling_factor",),
    ),
    FlagRow(name="--moe-router-num-groups", takes="int", fields=("model.moe.router.num_groups",)),
    FlagRow(name="--moe-router-group-topk", takes="int", fields=("model.moe.router.topk_groups",)),
    FlagRow(
        name="--moe-router-topk-limited-devices",
        takes="int",
        fields=("model.moe.router.num_groups", "model.moe.router.topk_groups"),
        how="a group for each ep rank",
    ),
    FlagRow(
        name="--moe-router-dtype",
        takes="choice",
        fields=("model.moe.router.dtype",),
        choices=("fp32", "fp64"),
        how="left out: model",
    ),
    FlagRow(
        name="--moe-router-enable-expert-bias",
        takes="nothing",
        fields=("model.moe.router.expert_bias",),
    ),
    FlagRow(
        name="--moe-router-bias-update-rate",
        takes="float",
        fields=("model.moe.router.expert_bias_update_rate",),
        default=1e-3,
        how="read with --moe-router-enable-expert-bias only",
    ),
    FlagRow(
        name="--moe-router-load-balancing-type",
        takes="words",
        fields=(
            "model.moe.aux_loss.batch_coeff",
            "model.moe.aux_loss.sequence_coeff",
            "model.moe.aux_loss.global_batch_coeff",
            "model.moe.aux_loss.sinkhorn",
            "model.moe.aux_loss.quantile",
            "model.moe.router.score",
            "model.moe.router.norm_topk_prob",
        ),
        how="aux_loss: batch; seq_aux_loss: sequence; global_aux_loss: global_batch; "
        "quantile_balancing: quantile; "
        "left out: aux_loss; sinkhorn weighs by softmax over all experts, and one expert per token "
        "by sigmoid",
    ),
    FlagRow(
        name="--moe-router-quantile-balancing-ema",
        takes="float",
        fields=("model.moe.aux_loss.quantile_ema",),
        default=0.0,
        how="read with --moe-router-load-balancing-type quantile_balancing only",
    ),
    FlagRow(
        name="--moe-aux-loss-coeff",
        takes="words",
        fields=(
            "model.moe.aux_loss.batch_coeff",
            "model.moe.aux_loss.sequence_coeff",
            "model.moe.aux_loss.global_batch_coeff",
        ),
        how="a weight for each loss; left out: 0",
    ),
    FlagRow(name="--moe-z-loss-coeff", takes="float", fields=("model.moe.aux_loss.z_loss_coeff",)),
    FlagRow(name="--moe-input-jitter-eps", takes="float", fields=("model.moe.router.jitter",)),
    FlagRow(
        name="--moe-router-force-load-balancing",
        takes="nothing",
        fields=("model.moe.router.force_load_balancing",),
    ),
    FlagRow(
        name="--moe-router-force-biased",
        takes="float",
        fields=("model.moe.router.force_biased",),
        how="without its sign: the numbers are the same in every step",
    ),
    FlagRow(
        name="--moe-expert-capacity-factor",
        takes="float",
        fields=("model.moe.capacity.factor",),
        how="of a microbatch over all ranks that share it; below 0: unset",
    ),
    FlagRow(
        name="--moe-token-drop-policy",
        takes="choice",
        fields=("model.moe.capacity.drop",),
        default="probs",
        choices=("probs", "position"),
        how="probs: least; position: last",
    ),
    FlagRow(
        name="--moe-pad-expert-input-to-capacity",
        takes="nothing",
        fields=("model.moe.capacity.pad",),
    ),
    FlagRow(
        name="--moe-token-dispatcher-type",
        takes="choice",
        fields=("parallel.dispatcher",),
        default="allgather",
        choices=("allgather", "alltoall", "flex"),
        how="allgather: allgather; the others: alltoall",
    ),
    FlagRow(
        name="--overlap-moe-expert-parallel-comm",
        takes="nothing",
        fields=("parallel.overlap_experts",),
        how="with any schedule that runs forwards and backwards by turns, 1f1b included",
    ),
    FlagRow(name="--moe-per-layer-logging", takes="nothing", fields=("observe.per_layer",)),
    FlagRow(
        name="--save-tokens-per-expert-interval",
        takes="int",
        fields=("observe.per_layer",),
        how="in metrics.jsonl, of all ranks, every train.log_every steps",
    ),
    FlagRow(
        name="--moe-routing-trace-path",
        takes="place",
        fields=("observe.routing_trace",),
        how="written to routing/ of the run's folder",
    ),
    FlagRow(
        name="--moe-routing-trace-max-training-iters",
        takes="int",
        fields=("observe.routing_trace",),
        how="read with --moe-routing-trace-path; left out, or 0: every step",
    ),
    FlagRow(
        name="--moe-routing-trace-capture-hidden-states",
        takes="nothing",
        fields=("observe.routing_captures",),
        how="hidden, read with --moe-routing-trace-path",
    ),
    FlagRow(
        name="--moe-routing-trace-capture-logits",
        takes="nothing",
        fields=("observe.routing_captures",),
        how="logits, read with --moe-routing-trace-path",
    ),
    FlagRow(
        name="--moe-routing-trace-dump-weights",
        takes="nothing",
        fields=("observe.routing_captures",),
        how="routers, read with --moe-routing-trace-path; of every traced step",
    ),
    FlagRow(
        name="--moe-apply-probs-on-input",
        takes="nothing",
        fields=("model.moe.apply_router_weight_on_input",),
    ),
    FlagRow(
        name="--moe-shared-expert-intermediate-size",
        takes="int",
        fields=("model.moe.shared_ffn_hidden_size",),
    ),
    FlagRow(name="--moe-shared-expert-gate", takes="nothing", fields=("model.moe.shared_gate",)),
    FlagRow(name="--moe-latent-size", takes="int", fields=("model.moe.latent_size",)),
    FlagRow(name="--expert-model-parallel-size", takes="int", fields=("parallel.ep",), default=1),
    FlagRow(name="--expert-tensor-parallel-size", takes="int", fields=("parallel.etp",)),
)

DATA = (
    FlagRow(
        name="--use-distributed-optimizer", takes="nothing", fields=("parallel.zero",), how="1"
    ),
    FlagRow(
        name="--use-megatron-fsdp",
        takes="nothing",
        fields=("parallel.zero",),
        aliases=("--use-custom-fsdp",),
        how="as --data-parallel-sharding-strategy says",
    ),
    FlagRow(
        name="--data-parallel-sharding-strategy",
        takes="choice",
        fields=("parallel.zero",),
        default="optim_grads_params",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
        how="no_shard: 0; optim: 1; optim_grads: 2; optim_grads_params: 3",
    ),
    FlagRow(name="--use-torch-fsdp2", takes="nothing", fields=("parallel.zero",), how="3"),
    FlagRow(
        name="--torch-fsdp2-no-reshard-after-forward",
        takes="nothing",
        fields=("parallel.zero",),
        how="2: weights stay whole, gradients and optimizer states do not",
    ),
    FlagRow(
        name="--num-distributed-optimizer-instances",
        takes="int",
        fields=("parallel.dp_replicate",),
        default=1,
        how="groups of data-parallel ranks that each hold everything once",
    ),
    FlagRow(
        name="--grad-reduce-in-bf16",
        takes="nothing",
        fields=("parallel.reduce_dtype",),
        how="bf16, where something is sharded; sums are taken in fp32",
    ),
    FlagRow(
        name="--ddp-bucket-size",
        takes="int",
        fields=("parallel.bucket_numel",),
        how="left out: ours",
    ),
)

MEMORY = (
    FlagRow(
        name="--recompute-granularity",
        takes="choice",
        fields=("recompute.granularity",),
        choices=("full", "selective"),
    ),
    FlagRow(
        name="--recompute-activations",
        takes="nothing",
        fields=("recompute.granularity",),
        how="selective, unless --recompute-granularity is given",
    ),
    FlagRow(
        name="--recompute-method",
        takes="choice",
        fields=("recompute.method",),
        choices=("uniform", "block"),
        how="left out: uniform",
    ),
    FlagRow(
        name="--recompute-num-layers",
        takes="int",
        fields=("recompute.num_layers",),
        how="left out: 1",
    ),
    FlagRow(
        name="--recompute-modules",
        takes="words",
        fields=("recompute.modules",),
        how="core_attn: core_attention; layernorm: norm; mlp, moe: mlp; shared_experts; "
        "mla_up_proj, with core_attn; "
        "those of other models are left out",
    ),
    FlagRow(
        name="--moe-layer-recompute",
        takes="nothing",
        fields=("recompute.granularity", "recompute.modules"),
        how="selective, with moe among --recompute-modules",
    ),
    FlagRow(
        name="--mlp-chunks-for-training",
        takes="int",
        fields=("recompute.mlp_chunks",),
        how="with mlp among --recompute-modules; elsewhere left out, since results are the same",
    ),
    FlagRow(
        name="--distribute-saved-activations", takes="nothing", fields=("recompute.shard_inputs",)
    ),
    FlagRow(name="--cpu-offloading-num-layers", takes="int", fields=("offload.layers",), default=0),
)

FOLDERS = (
    FlagRow(
        name="--save",
        takes="place",
        fields=("checkpoint.every",),
        how="the run's folder is chosen by train --run",
    ),
    FlagRow(
        name="--no-save-optim", takes="nothing", fields=("checkpoint.save_optimizer",), how="false"
    ),
    FlagRow(
        name="--load",
        takes="place",
        fields=("checkpoint.load",),
        how="the folder of --save: train resumes anyway",
    ),
    FlagRow(
        name="--save-interval",
        takes="int",
        fields=("checkpoint.every",),
        aliases=("--persistent-save-interval",),
        how="without --save: only the last step is kept",
    ),
    FlagRow(
        name="--save-retain-interval",
        takes="int",
        fields=("checkpoint.keep_every", "checkpoint.keep"),
        how="multiples of it stay, besides the newest; left out: all stay",
    ),
    FlagRow(
        name="--most-recent-k",
        takes="int",
        fields=("checkpoint.keep",),
        how="the newest so many stay; -1: all",
    ),
    FlagRow(
        name="--tensorboard-dir",
        takes="place",
        fields=("observe.tensorboard",),
        how="true; into the run's folder",
    ),
)

MAPPED = (
    *MODEL,
    *EXPERTS,
    *TOKENS,
    *STEPS,
    *OPTIMIZER,
    *LAYOUT,
    *PIPELINE,
    *CONTEXT,
    *DATA,
    *MEMORY,
    *FOLDERS,
)
