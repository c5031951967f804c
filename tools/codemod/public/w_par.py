"""Public renames of parallel and testing."""
HISTORY = ("CHANGELOG.md", "docs/log.md", "docs/log/*")
PAR = ("megalith/parallel/*", "tests/parallel/*", "tests/equivalence/*", "megalith/verify/*", "tests/verify/*")
GROUP = ("megalith/parallel/*", "tests/parallel/test_group.py", "tests/parallel/test_fingerprints.py")
ALONE = ("benchmarks/contenders/kernels.py", "benchmarks/contenders/parity.py", "benchmarks/kernels.py", "megalith/parallel/*", "megalith/testing/ranks.py", "megalith/verify/expert_faults.py", "megalith/verify/faults.py", "tests/checkpoint/conftest.py", "tests/checkpoint/test_agree.py", "tests/checkpoint/test_load.py", "tests/checkpoint/test_save.py", "tests/checkpoint/test_statistics.py", "tests/cli/test_chat.py", "tests/cli/test_checkpoint.py", "tests/cli/test_convert.py", "tests/cli/test_generate.py", "tests/data/test_loader.py", "tests/infer/test_load.py", "tests/kernels/test_best_token.py", "tests/kernels/test_cpu.py", "tests/kernels/test_cross_entropy.py", "tests/kernels/test_triton_loss.py", "tests/kernels/test_watched_loss.py", "tests/kernels/test_z_loss.py", "tests/models/test_convert.py", "tests/models/test_pretrained.py", "tests/nn/test_dropout.py", "tests/nn/test_kernels.py", "tests/parallel/test_alike.py", "tests/parallel/test_autograd.py", "tests/parallel/test_expert.py", "tests/parallel/test_group.py", "tests/parallel/test_link.py", "tests/parallel/test_recompute.py", "tests/parallel/test_symm_mem.py", "tests/parallel/test_worker.py", "tests/plan/test_costs.py", "tests/posttrain/test_upcycle.py", "tests/train/test_divergence.py", "tests/verify/test_choice_faults.py", "tests/verify/test_expert_faults.py", "tests/verify/test_loss_faults.py", "tests/verify/test_type_rules.py")


def every(old, new):
    return name(old, new, text=True, exclude=HISTORY)


RULES = [
    # groups
    name("note", "record_collective", files=("megalith/parallel/autograd.py", "megalith/parallel/fsdp.py", "megalith/parallel/rings.py", "megalith/parallel/slices.py", "megalith/parallel/symm_mem.py", "megalith/parallel/group.py")),
    regex(r"`note`", "`record_collective`", files="megalith/parallel/group.py"), regex(r"`finished`", "`mark_finished`", files="megalith/parallel/group.py"),
    name("finished", "mark_finished", files=("megalith/parallel/autograd.py", "megalith/parallel/fsdp.py", "megalith/parallel/rings.py", "megalith/parallel/symm_mem.py", "megalith/parallel/group.py")),
    every("note_message", "record_message"), every("stands_still_for", "mark_waiting"), name("on_its_way", "track_work", files=GROUP),
    name("alone", "single_rank_group", files=ALONE), regex(r"\bsingle_rank_group=\[", "alone=[", files="megalith/parallel/data.py"),
    every("all_gathered", "start_all_gather"), every("my_range", "local_range"),
    every("mesh_on_paper", "build_meta_mesh"), every("mesh_of_one", "build_single_rank_mesh"),
    # pipeline messages
    name("handles_of", "create_pipeline_groups", text=True, exclude=HISTORY), name("Handles", "PipelineGroups", text=True, files=PAR + ("megalith/train/*", "tests/train/*")),
    name("Posted", "PendingReceive", text=True, files=PAR), name("Outbox", "SendQueue", text=True, files=PAR), every("specs_of", "tensor_specs"),
    name("Stopped", "PassAborted", files=("megalith/parallel/turns.py",)), name("ANNOUNCED", "HEADER_LENGTH", files=("megalith/parallel/link.py", "tests/parallel/test_link.py")),
    # asynchronous collectives
    name("Works", "PendingMessages", files=("megalith/parallel/*", "megalith/verify/faults.py", "tests/parallel/test_slices.py")), every("SliceSum", "PendingReduceScatter"),
    name("Started", "PendingCollective", files=("megalith/parallel/*", "megalith/verify/faults.py", "tests/equivalence/test_context.py", "tests/parallel/*")), every("start_passing", "start_ring_exchange"),
    name("start_sum", "start_all_reduce", files=("megalith/parallel/rings.py", "megalith/parallel/tensor.py", "tests/parallel/test_rings.py")),
    name("start_gather", "start_all_gather_", files=("megalith/parallel/rings.py", "megalith/parallel/tensor.py", "tests/parallel/test_rings.py")), name("start_all_gather_", "start_token_gather", files=("megalith/parallel/rings.py", "megalith/parallel/tensor.py", "tests/parallel/test_rings.py")),
    name("start_scatter", "start_reduce_scatter", files=("megalith/parallel/rings.py", "megalith/parallel/tensor.py", "tests/parallel/test_rings.py")),
    name("start_sum", "start_bucket_reduce_scatter", text=True, files=("megalith/parallel/slices.py", "megalith/parallel/data.py", "tests/parallel/test_data.py", "tests/parallel/test_slices.py", "tests/equivalence/test_zero.py", "megalith/verify/*")),
    name("start_gather", "start_bucket_all_gather", text=True, files=("megalith/parallel/slices.py", "megalith/parallel/publish.py", "tests/parallel/test_slices.py", "tests/parallel/test_publish.py", "tests/equivalence/test_zero.py", "megalith/verify/*")),
    # collective matmul
    every("fused_gather_product", "fused_all_gather_matmul_op"), every("fused_product_scatter", "fused_matmul_reduce_scatter_op"),
    every("gather_product", "ring_all_gather_matmul"), every("product_scatter", "ring_matmul_reduce_scatter"),
    every("fused_all_gather_matmul_op", "symm_mem_all_gather_matmul"), every("fused_matmul_reduce_scatter_op", "symm_mem_matmul_reduce_scatter"),
    regex(r"\bproducts\.gathered\(", "products.all_gather_matmul(", files=PAR), regex(r"\bproducts\.scattered\(", "products.matmul_reduce_scatter(", files=PAR),
    field("CollectiveMatmul", "gathered", "all_gather_matmul"), field("CollectiveMatmul", "scattered", "matmul_reduce_scatter"),
    # layers
    every("WholeLinear", "ReplicatedLinear"), every("ColumnLinear", "ColumnParallelLinear"), every("RowLinear", "RowParallelLinear"), every("VocabEmbedding", "VocabParallelEmbedding"), every("VocabHead", "VocabParallelHead"),
    regex(r"\bhead\.again\(\)", "head.share_weight()"), field("VocabParallelHead", "again", "share_weight"), every("heads_of", "iter_vocab_heads"), every("choose_losses", "set_training_losses"),
    regex(r"\btp_comm\.mine\b", "tp_comm.select_local"), regex(r"ParallelComm\(group\)\.mine\(", "ParallelComm(group).select_local(", files="tests/*"), field("TPComm|TensorParallelComm|SequenceParallelComm", "mine", "select_local"),
    regex(r'"declared"', '"param_specs"', files=("megalith/*", "tests/*")), regex(r"\bmodule\.declared\b", "module.param_specs", files="megalith/parallel/tensor.py"), attr("declared", "param_specs"),
    # context parallelism
    name("Ring", "RingAttend", files=("megalith/parallel/context.py", "megalith/nn/kernels.py", "tests/nn/test_kernels.py", "tests/parallel/test_context.py")), regex(r'\["Ring", "All', '["RingAttend", "All', files="tests/parallel/test_context.py"), every("HeadExchange", "UlyssesAttend"), every("HeadsThenRing", "UlyssesRingAttend"),
    every("heads_for_tokens", "exchange_tokens_for_heads"), every("tokens_for_heads", "exchange_heads_for_tokens"), every("my_slicing", "local_slicing"), every("of_my_heads", "select_local_heads"), every("scores_of_my_heads", "scores_of_local_heads"),
    name("sight", "attention_range", text=False, files=("megalith/parallel/context.py", "tests/parallel/test_context.py", "megalith/verify/attention_faults.py")),
    # data parallelism
    every("division_of", "shard_groups"), every("divisions_of", "shard_groups_by_grid"), name("Division", "ShardGroups", files=PAR), name("Divisions", "ShardGroupsByGrid", files=PAR),
    name("divides", "can_shard_weights", files=("megalith/parallel/engine.py", "megalith/train/build.py", "megalith/train/evaluate.py", "tests/parallel/test_engine.py")),
    every("warn_of_zeros", "warn_unused_params"), every("sum_of_bytes", "byte_checksum"), every("divide_frozen", "split_trained_and_frozen"), every("sum_shared_slices", "all_reduce_shared_gradients"),
    name("tensor_axes", "tp_reduce_axes", files=("megalith/parallel/*", "tests/plan/test_parameters.py", "tests/parallel/*", "megalith/verify/*")), every("TENSOR_SUMS", "TP_REDUCE_AXES"),
    every("divide_for_forward", "shard_for_forward"), every("SumsInOrder", "OrderedAllReduces"), every("look_at", "check_finite"),
    name("sinks", "accumulate_in_buckets", files="megalith/parallel/data.py"), callkw(r"BucketedDataParallel", "sinks", "accumulate_in_buckets"),
    # recomputation, offload, experts
    name("Away", "OffloadedStorage", text=False, files=("megalith/parallel/offload.py", "megalith/verify/faults.py", "tests/parallel/test_offload.py", "tests/plan/test_activations.py")), name("View", "OffloadedTensor", files="megalith/parallel/offload.py"),
    every("regather", "all_gather_no_grad"), every("passes_of", "count_forward_passes"), name("sharded", "shard_saved_input", files=("megalith/parallel/recompute.py", "tests/parallel/test_recompute.py")),
    name("turns", "saves_rope_tables", text=True, files=("megalith/parallel/recompute.py",)), kwarg("turns", "saves_rope_tables", files="megalith/nn/block.py"),
    name("calling", "with_overlap_fn", files=("megalith/parallel/expert.py", "megalith/nn/moe/layer.py")), every("counts_of_all", "all_gather_counts"), every("groups_here", "local_expert_groups"),
    name("on_host", "counts_to_list", files=("megalith/parallel/expert.py", "megalith/parallel/transports.py")), every("steps_in_both", "ep_etp_strides"), name("order_of", "order_rows", files="megalith/parallel/expert.py"),
    # launch
    name("meet", "open_rendezvous", text=False, files=("megalith/parallel/worker.py", "megalith/train/job.py", "tests/parallel/test_worker.py")), regex(r"`meet`", "`open_rendezvous`", files="megalith/parallel/worker.py"),
    every("another_connection", "clone_store"), every("machine_problem", "describe_slow_tp"),
    name("in_order", "sort_failures", files=("megalith/parallel/failure.py", "megalith/parallel/launch.py", "tests/parallel/test_failure.py", "megalith/testing/ranks.py")), every("failure_of_exit", "exit_failure"), every("failure_of", "exception_failure"),
    # testing
    name("Odd", "OddSizedModel", files=("megalith/testing/odd.py", "tests/parallel/*", "tests/testing/test_odd.py")),
    name("replaced", "patched", text=False, files=("benchmarks/contenders/overlapped.py", "megalith/testing/*", "megalith/verify/*", "tests/*")),
]
