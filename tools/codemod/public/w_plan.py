"""Public names of megalith/plan that other packages use."""
DEAL = ("megalith/plan/*", "megalith/data/*", "megalith/train/*", "megalith/verify/*", "tests/plan/*", "tests/data/*", "tests/equivalence/*", "tests/train/*", "tests/verify/*")
FILL = ("megalith/plan/*", "megalith/data/*", "tests/plan/*", "tests/data/*", "benchmarks/*", "docs/*")
BUCKETS = ("megalith/plan/buckets.py", "tests/plan/test_buckets.py")
RULES = [
 # --- load-balanced batching, bin packing
 name("Budget", "TokenBudget", files=DEAL, text=False),
 name("budget_of", "build_token_budget", text=True),
 name("fill_in_order", "pack_in_order", text=True, files=FILL),
 name("fill_best", "pack_best_fit_decreasing", text=True, files=FILL),
 name("fill_first", "pack_first_fit_decreasing", text=True, files=FILL),
 name("fill_apart", "pack_one_per_row", text=True, files=FILL),
 name("fill_by_group", "pack_by_group", text=True, files=FILL),
 name("microbatches_that_fit", "smallest_valid_num_microbatches", text=True),
 name("microbatches_of_longest", "count_microbatches_of_longest", text=True),
 # --- gradient buckets
 kwarg("together", "contiguous", files=("megalith/plan/memory.py", "megalith/parallel/data.py")),
 name("together", "contiguous", files=BUCKETS),
 regex(r"`together`", "`contiguous`", files=BUCKETS),
 regex(r"\btogether=", "contiguous=", files=BUCKETS),
 regex(r"\balone, together: no", "alone, contiguous: no", files=BUCKETS),
 regex(r"\"together\": ", "\"contiguous\": ", files=("tests/plan/test_buckets.py",)),
 regex(r"\btogether: ascending runs", "contiguous: ascending runs", files=BUCKETS),
 # --- rates, initial values
 name("rates_in", "parameter_rates", text=True),
 name("start_of", "initial_values", text=True, files=("megalith/plan/initial.py", "megalith/models/decoder.py", "tests/plan/*")),
 # --- FSDP, shards
 name("rows_of", "shard_rows", text=True, files=("megalith/plan/fsdp.py", "megalith/parallel/fsdp.py", "tests/plan/test_fsdp.py")),
 name("summed_over", "gradient_sum_axes", text=True),
 # --- recomputation
 name("chosen_recompute", "resolve_auto_recompute", text=True),
 name("chosen_words", "describe_auto_recompute", text=True),
 name("modules_again", "recomputed_modules", text=True),
 name("run_lines", "describe_savings", text=True, files=("megalith/plan/savings.py", "megalith/train/*", "tests/plan/test_savings.py", "tests/train/*")),
 # --- schedules, stages
 name("peak_held", "peak_activation_memory", text=True, files=("megalith/plan/*", "megalith/observe/timeline.py", "megalith/verify/schedules.py", "tests/plan/*", "tests/verify/*", "tests/observe/*", "docs/*")),
 name("peak_live", "peak_microbatches_in_flight", text=True, files=("megalith/plan/*", "tests/plan/*")),
 name("pipeline_in_use", "effective_pipeline", text=True),
 name("whole_model", "single_stage", text=True, files=("megalith/plan/*", "megalith/models/decoder.py", "tests/plan/*", "tests/models/*", "tests/hf/*")),
 # --- times, rules
 name("Passage", "CommunicationTime", text=False),
 name("passage", "communication_time", files=("megalith/plan/times.py", "tests/plan/test_times.py", "megalith/cli/plan_tables.py")),
 name("one_choice_has_a_weight", "check_single_expert_weight", text=True),
 name("grid_of_experts", "build_expert_grid", text=True, files=("megalith/plan/*", "tests/plan/*")),
 name("fewest_ranks", "min_world_size", text=True),
]
