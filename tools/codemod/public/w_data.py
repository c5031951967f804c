"""Renames of public names of megalith/data and megalith/verify."""
DATA = ("megalith/data/*", "tests/data/*", "megalith/verify/ragged.py", "tests/verify/test_ragged.py", "megalith/train/evaluate.py")
ALL = ("megalith/*", "tests/*", "benchmarks/*", "examples/*")
RULES = [
    # a leftover of the rename of `ahead`: Decoder.forward takes mtp_hidden
    regex(r'\{"ahead": tuple\(rest\)\}', '{"mtp_hidden": tuple(rest)}', files="megalith/models/decoder.py"),
    # data: samples and loader
    name("lengths_of", "document_lengths", files=DATA),
    name("Indexed", "HasDocumentLengths", text=True, files=("megalith/data/*", "tests/data/*", "megalith/train/evaluate.py")),
    name("numbers_of", "token_numbers", files="megalith/train/replay.py"),
    name("masks_of", "build_mask_settings", text=True, files=("megalith/data/*", "tests/data/*", "megalith/train/*", "tests/train/*")),
    name("masks_of_rows", "row_masks", files=("megalith/data/*", "tests/data/*")),
    name("Masks", "MaskSettings", files=("megalith/data/*", "tests/data/*", "megalith/train/*", "tests/train/*", "megalith/verify/ranks.py", "tests/verify/*", "tests/equivalence/*", "tests/parallel/*", "tests/models/*", "tests/testing/*", "benchmarks/*")),
    name("shuffle_of_epoch", "epoch_permutation", text=True, files=("megalith/data/*", "tests/data/*")),
    name("read_lengths", "lengths_without_padding", files=("megalith/data/sample.py", "megalith/data/loader.py", "megalith/data/packs.py", "tests/data/test_sample.py", "tests/data/test_packs.py", "tests/data/test_loader.py", "tests/data/test_sft.py", "tests/verify/test_ragged.py")),
    # data: packing
    name("room", "packing_input", files=("megalith/data/sft.py", "megalith/cli/pack.py", "tests/data/test_sft.py")),
    name("report_of", "summarize_packing", text=True, files=("megalith/data/packs.py", "megalith/cli/pack.py", "tests/data/test_packs.py")),
    # data: blends and stores
    name("normalized", "normalize_weights", files=("megalith/data/blend.py", "tests/data/test_blend.py", "benchmarks/indices.py")),
    name("member_sizes", "compute_member_sizes", files=("megalith/data/*", "tests/data/*", "benchmarks/indices.py")),
    name("weighted_order", "build_weighted_order", files=("megalith/data/*", "tests/data/*", "benchmarks/indices.py")),
    name("exhaustive_order", "build_exhaustive_order", files=("megalith/data/*", "tests/data/*", "benchmarks/indices.py")),
    # data: tokenizers
    name("of_gpt2", "is_gpt2_format", files=("megalith/data/*", "megalith/models/*", "tests/data/*", "tests/models/*")),
    name("brought_along", "locate_copied_tokenizer", text=True, files=("megalith/data/tokenizer.py", "megalith/models/*", "tests/data/*", "tests/models/*")),
    name("ends_texts_itself", "appends_eod", text=True, files=("megalith/data/*", "megalith/cli/*", "megalith/infer/*", "tests/data/*", "tests/cli/*", "tests/infer/*")),
    name("kind_of", "detect_tokenizer_kind", files=("megalith/data/tokenizer.py", "megalith/cli/data.py", "megalith/cli/prepare.py", "tests/data/*")),
    name("written", "to_files", files=("megalith/data/huggingface.py",)),
    attr("written", "to_files", files=("tests/data/test_huggingface.py", "megalith/models/companions.py")),
    # verify
    name("prove_run", "verify_run", text=True, files=ALL),
    name("prove_row", "verify_row", text=True, files=ALL),
    name("prove_all", "verify_matrix", text=True, files=ALL),
    name("prove_layout", "compare_with_one_process", text=True, files=ALL),
    name("shrunk_words", "describe_copy", text=True, files=ALL),
    name("rows_of_matrix", "matrix_rows", text=True, files=ALL),
    name("judge", "judge_fault", files=("megalith/verify/*", "tests/verify/*")),
    name("Verdict", "FaultResult", text=True, files=("megalith/verify/*", "tests/verify/*", "megalith/cli/verify.py", "tests/cli/*", "tools/fault_table.py")),
    name("planted", "plant_fault", files=("megalith/verify/*", "tests/verify/*")),
    name("fault_named", "find_fault", files=("megalith/verify/*", "tests/*", "megalith/cli/*")),
    # a name of variants and of rows of the matrix
    regex(r'"looking back([",])', r'"cross-layer\1', files=("tests/plan/*", "tests/models/*", "tests/infer/*", "tests/parallel/*", "tests/kernels/*", "tests/nn/*")),
]
