"""Public names of megalith/config and megalith/cli."""
CONF = ("megalith/config/*.py",)
FIELDS = ("megalith/config/tree.py", "megalith/config/fields.py", "megalith/cli/arguments.py", "tests/config/*", "tests/cli/test_arguments.py", "tests/train/test_rules.py")
CLI = ("megalith/cli/*", "tests/cli/*")
def cli(old, new, module, **k): return name(old, new, files=(f"megalith/cli/{module}.py", f"tests/cli/test_{module}.py"), **k)
RULES = [
 # --- config: types
 name("Part", "LayerPart", files=("megalith/config/layers.py", "megalith/config/model.py", "megalith/config/blocks.py", "tests/nn/test_block.py", "tests/models/test_decilm.py")),
 name("Taken", "LoadMode", files=("megalith/config/checkpoint.py", "tests/config/test_checkpoint.py")),
 name("Answer", "KeyMismatchAction", files=("megalith/config/checkpoint.py", "megalith/checkpoint/strictness.py", "tests/checkpoint/test_load.py")),
 name("NewRows", "NewRowInit", files=("megalith/config/checkpoint.py", "megalith/models/*", "megalith/hf/*", "megalith/cli/convert.py")),
 name("Drop", "TokenDropPolicy", files=("megalith/config/moe.py", "megalith/kernels/routing.py", "tests/nn/moe/test_router.py")),
 name("Score", "RouterScore", files=("megalith/config/moe.py", "megalith/kernels/routing.py", "tests/kernels/test_balance.py")),
 name("ALIKE", "EQUAL_LAYERS", files=("megalith/config/*", "tests/config/test_blocks.py", "tests/models/test_decilm.py")),
 name("Sizes", "BlockModelSizes", files=("megalith/config/blocks.py", "megalith/config/megatron/blocks.py", "megalith/models/decilm.py", "megalith/hf/decilm.py", "tests/config/test_blocks.py")),
 name("MOST", "MAX_MULTIPLIER", files=("megalith/config/blocks.py",)),
 name("WIDTHS", "SIZE_MULTIPLE", files=("megalith/config/blocks.py",)),
 # --- config: functions
 name("switch_of", "default_backend", files=("megalith/config/kernels.py", "megalith/plan/kernels.py", "megalith/plan/advice.py", "tests/config/test_kernels.py")),
 name("kernels_of", "expand_kernel_setting", files=("megalith/config/kernels.py", "megalith/nn/kernels.py", "megalith/plan/kernels.py", "tests/config/test_kernels.py")),
 name("plainly", "reset_explicit_backends", files=("megalith/config/kernels.py", "megalith/verify/shrink.py", "tests/config/test_kernels.py")),
 name("fits", "matches_any_pattern", files=("megalith/config/optim.py", "megalith/plan/groups.py")),
 name("matrix_of", "find_lora_target", files=("megalith/config/lora.py", "megalith/models/adapters.py", "megalith/hf/*")),
 name("adapts_something", "adapts_any_layer", files=("megalith/config/lora.py",)),
 name("multiplier_of", "find_ffn_multiplier", files=("megalith/config/blocks.py", "megalith/models/decilm.py", "megalith/hf/*", "tests/config/test_blocks.py")),
 name("width_of", "compute_ffn_size", files=("megalith/config/blocks.py", "tests/config/test_blocks.py")),
 name("merges_beside", "find_merges_file", files=("megalith/config/*", "megalith/train/folder.py", "megalith/data/huggingface.py")),
 name("attention_notes", "list_attention_warnings", files=("megalith/config/attention.py", "megalith/train/loop.py", "tests/config/test_attention.py")),
 name("split_of", "get_split", files=("megalith/config/data.py", "megalith/data/build.py", "tests/config/test_data.py")),
 name("shown_value", "format_value", files=("megalith/config/show.py", "megalith/cli/from_megatron.py", "tests/config/test_show.py")),
 name("run_table", "build_run_table", files=("megalith/config/show.py", "megalith/cli/recipes.py", "tests/config/test_show.py")),
 name("difference_table", "build_difference_table", files=("megalith/config/show.py", "megalith/cli/recipes.py", "tests/config/test_show.py")),
 name("docs_of", "field_docs", files=FIELDS), name("hints_of", "field_types", files=FIELDS), name("default_of", "field_default", files=FIELDS),
 name("origin_of", "type_origin", files=FIELDS), name("is_many", "is_sequence_type", files=FIELDS), name("is_section", "is_section_type", files=FIELDS),
 name("options_of", "union_options", files=FIELDS), name("type_name", "describe_type", files=FIELDS), name("section_of", "find_section_type", files=FIELDS),
 # --- config: methods
 name("score_scale", "softmax_scale", files=("megalith/config/model.py",)), regex(r"\.score_scale\(", ".softmax_scale(", files=("megalith/*", "tests/*")),
 name("forced_settings", "list_benchmark_settings", files=("megalith/*", "tests/*")),
 name("has_cross_layer_source_before", "find_cross_layer_source", files=("megalith/*", "tests/*")),
 name("needs_biases", "needs_relative_biases", files=("megalith/*", "tests/*")),
 field("RouterConfig", "draws", "uses_random_numbers"), regex(r"router\.draws\(", "router.uses_random_numbers(", files=("megalith/*", "tests/*")),
 field("DropoutConfig", "drops", "is_enabled"), regex(r"dropout\.drops\(", "dropout.is_enabled(", files=("megalith/*", "tests/*")), attr("drops", "is_enabled", files=("tests/config/test_dropout.py",)),
 # --- cli
 name("tell_warnings", "print_warnings", files=CLI),
 cli("fitted", "fit_layout_to_world", "evaluate"), cli("with_experts_divided", "fit_expert_parallel", "evaluate"),
 name("with_recompute_chosen", "resolve_recompute", files=CLI), cli("checked_workload", "build_checked_workload", "plan"),
 name("passages", "list_transfers", files=CLI),
 cli("write_all", "generate_all", "generate"), cli("worker_words", "build_worker_arguments", "generate"), cli("worker_words", "build_worker_arguments", "chat"),
 cli("take_turn", "handle_turn", "chat"), cli("spoken", "read_lines", "chat"), cli("talk", "run_chat", "chat"),
 cli("newest_in", "find_latest_checkpoint", "checkpoint"), cli("folder_named", "find_folder", "checkpoint"), cli("checkpoints_in", "list_checkpoints", "checkpoint"),
 cli("config_of", "build_prepare_config", "prepare"), cli("text_of", "format_report", "pack"),
 cli("use_lines", "format_expert_load", "routing"), cli("predictability_lines", "format_predictability", "routing"), cli("router_lines", "format_router_predictions", "routing"),
 cli("split_own", "split_options", "from_megatron"), cli("shown_progress", "show_progress", "convert"), cli("show_peft", "print_adapter_result", "convert"),
]
