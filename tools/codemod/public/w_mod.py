"""Public renames of models, posttrain, infer (package-only names are already renamed on the branch)."""
HISTORY = ("CHANGELOG.md", "docs/log.md", "docs/log/*")
MODELS = ("megalith/models/*", "megalith/hf/*", "megalith/posttrain/*", "tests/models/*", "tests/hf/*", "tests/posttrain/*")
CONVERT = (*MODELS, "megalith/cli/convert.py", "tests/cli/test_convert.py", "benchmarks/convert.py")
INFER = ("megalith/infer/*", "megalith/cli/chat.py", "megalith/cli/generate.py", "tests/infer/*", "tests/cli/*")
RULES = [
    # loading of weights
    name("take_weights", "load_weights_with_records", text=True, exclude=HISTORY),
    name("compare_models", "check_same_model", text=True, exclude=HISTORY),
    name("locate", "locate_source", files=("megalith/models/pretrained.py", "megalith/hf/*", "megalith/infer/load.py", "megalith/posttrain/*", "megalith/cli/convert.py", "megalith/train/origin.py", "megalith/train/checkpoint_source.py", "megalith/train/loop.py", "tests/*")),
    regex(r'"locate"', '"locate_source"', files=("tests/models/test_pretrained.py", "tests/hf/test_pretrained.py", "tests/hf/*")),
    regex(r"`locate`", "`locate_source`", files=("megalith/models/*", "megalith/hf/*")),
    regex(r"`locate\(source\)`", "`locate_source(source)`", files=("megalith/models/*", "megalith/hf/*")),
    name("require_adapters", "check_has_adapters", text=True, exclude=HISTORY),
    name("require_base", "check_base_weights", text=True, exclude=HISTORY),
    name("base_record", "build_base_record", text=True, exclude=HISTORY),
    # conversion
    name("kind_of", "format_of", files=("megalith/models/convert.py", "megalith/hf/*", "megalith/cli/convert.py", "tests/models/test_convert.py", "tests/hf/test_convert.py")),
    name("recipe_of", "build_recipe", text=True, exclude=HISTORY),
    name("merged_into", "describe_merged_adapters", text=True, exclude=HISTORY),
    name("written_names", "list_written_tensors", text=True, exclude=HISTORY),
    name("peft_moves", "plan_peft_moves", text=True, exclude=HISTORY),
    name("wrote", "on_written", files=CONVERT),
    regex(r"`wrote`", "`on_written`", files=CONVERT),
    name("read_from", "stored_weights", files=("megalith/posttrain/*", "megalith/cli/convert.py", "tests/posttrain/*")),
    # decoder
    name("declared_parameters", "iter_parameter_specs", text=True, exclude=HISTORY),
    regex(r"\b(model|chunk|last)\.received\(", r"\1.stage_inputs(", files=("megalith/train/*", "megalith/verify/*", "tests/*")),
    regex(r"def received\(self, tensors", "def stage_inputs(self, tensors", files=("megalith/models/*", "megalith/hf/*")),
    # generation
    name("template_of", "select_template", text=True, exclude=HISTORY),
    name("writing_layout", "generation_layout", text=True, exclude=HISTORY),
    name("writer", "generator", files=INFER),
]
