"""Public names of megalith/kernels and megalith/nn."""
K = ("megalith/kernels/*", "tests/kernels/*", "megalith/nn/*", "tests/nn/*")
TOKENS = ("megalith/kernels/tokens.py", "megalith/parallel/context.py", "megalith/verify/attention_faults.py", "megalith/verify/faults.py", "megalith/verify/types.py", "tests/verify/test_attention_faults.py", "tests/parallel/test_context.py")
REPLAY = ("megalith/kernels/replay.py", "megalith/kernels/tokens.py", "megalith/parallel/recompute.py", "megalith/train/*", "tests/kernels/*", "tests/nn/*", "tests/train/*", "tests/verify/test_type_rules.py")
SPANS = ("megalith/kernels/span_attention.py", "megalith/verify/attention_faults.py", "megalith/parallel/context.py", "tests/kernels/test_span_attention.py", "tests/parallel/test_context.py", "tests/equivalence/test_context.py", "tests/verify/test_attention_faults.py")
PERMUTE = ("megalith/kernels/permute.py", "megalith/parallel/expert.py", "megalith/parallel/transports.py", "tests/kernels/*")
def quoted(old, new, **k): return regex(rf"([\"'`]){old}\1", rf"\g<1>{new}\g<1>", **k)
RULES = [
 # --- attention
 name("nothing_found", "init_attention_result", text=True),
 name("Result", "PartialAttention", files=("megalith/kernels/span_attention.py", "megalith/verify/attention_faults.py")),
 name("Gradients", "AttentionGrads", files=SPANS),
 name("VisiblePairs", "PairMask", text=True), name("Visible", "AttentionMask", files=("megalith/kernels/*", "megalith/nn/*", "megalith/parallel/context.py", "tests/*")),
 regex(r"\"SeenPairs\"", "\"PairMask\"", files="tests/parallel/test_context.py"),
 name("dropped_between", "build_dropped_weights", text=True),
 name("with_places", "with_multimodal_positions", text=True),
 name("Join", "TokenPermutation", files=TOKENS), name("Context", "ContextShard", files=TOKENS), regex(r'"Context \| None"', '"ContextShard | None"', files="megalith/kernels/tokens.py"),
 # --- loss
 name("AS_THEY_ARE", "IDENTITY_LOGITS", text=True),
 name("measured_cross_entropy", "linear_cross_entropy_with_stats", text=True), name("recomputed_measures", "recomputed_cross_entropy_with_stats", text=True),
 name("Head", "HeadShard", files=("megalith/kernels/cross_entropy.py", "megalith/verify/loss_faults.py", "tests/plan/test_costs.py", "tests/verify/test_loss_faults.py", "tests/kernels/*")), quoted("Head", "HeadShard", files="megalith/kernels/cross_entropy.py"),
 name("best_tokens", "greedy_tokens", text=True),
 # --- experts
 name("put_grouped_product_", "accumulate_grouped_product_", text=True),
 name("Order", "RowPermutation", files=PERMUTE), name("order_choices", "permute_choices", text=True), name("order_padded", "permute_choices_padded", text=True), name("undone", "invert_chunk_order", files=PERMUTE), quoted("undone", "invert_chunk_order", files=("megalith/verify/faults.py", "megalith/kernels/permute.py")),
 name("NOWHERE", "DROPPED_CHOICE", text=True), name("capacity_of", "expert_capacity", text=True),
 name("Decided", "RoutingDecisions", files=REPLAY, exclude=("megalith/plan/*",)), name("Route", "MicrobatchRouting", files=REPLAY), regex(r"kernels\.replay\.Route\.", "kernels.replay.MicrobatchRouting."), name("Routing", "RoutingRecord", files=REPLAY), quoted("Routing", "RoutingRecord", files="megalith/kernels/replay.py"),
 name("Record", "RoutingStats", files=("megalith/nn/moe/*", "megalith/train/experts.py", "megalith/verify/expert_faults.py", "tests/nn/moe/*")), name("Balance", "LoadBalancing", files=("megalith/nn/moe/*", "megalith/verify/*", "tests/nn/moe/*")), name("record_of", "stats_of_step", text=True, files=("megalith/nn/moe/*", "tests/*", "megalith/verify/*")),
 name("BalanceShare", "AuxLossScale", text=True),
 attr("moved", "expert_bias", files=("megalith/nn/moe/router.py", "megalith/train/experts.py", "megalith/verify/ranks.py", "tests/nn/moe/*", "tests/equivalence/test_experts.py", "tests/train/test_experts.py", "tests/train/test_replay.py")), field("Router", "moved", "expert_bias"),
 # --- modules
 name("BelowTrained", "FrozenLayerRunner", text=True), name("read_prompts_in_chunks", "chunk_prefill_mlps", text=True),
 name("given_to", "add_to", text=True), name("after_adding", "add_and_normalize", text=True),
 name("first_input", "first_input_feature", files=K), quoted("first_input", "first_input_feature", files="megalith/verify/faults.py"),
 regex(r'"declared"', '"param_specs"', files=("megalith/*", "tests/*")), attr("declared", "param_specs", files=("tests/nn/test_relative_bias.py",)), regex(r"module\.declared\b", "module.param_specs", files=("megalith/parallel/tensor.py",)),
]
