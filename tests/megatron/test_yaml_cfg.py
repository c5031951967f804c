"""YAML files of Megatron's training script become the same run as the arguments in them."""

from pathlib import Path

import pytest

from megalith.errors import ConfigError
from megalith.megatron.translate import translate
from megalith.megatron.yaml_cfg import expand_yaml_flag, read_yaml_words

YAML = """
language_model:
  num_layers: 4
  hidden_size: 64
  num_attention_heads: 4
  num_query_groups: 2
  ffn_hidden_size: 128
  kv_channels: null
  hidden_dropout: 0.0
  attention_dropout: 0.0
  fp32_residual_connection: False
  apply_residual_connection_post_layernorm: False
  layernorm_epsilon: 1.e-5
  layernorm_zero_centered_gamma: True
  add_bias_linear: False
  bias_activation_fusion: False
  add_qkv_bias: False
  gated_linear_unit: False
  activation_func: swiglu
  num_moe_experts: null
  rotary_interleaved: False
  window_size: null
  init_method: null
  init_method_std: 0.02
  apply_query_key_layer_scaling: False
  attention_softmax_in_fp32: False
  bias_swiglu_fusion: True
  masked_softmax_fusion: True
  persist_layer_norm: False
  memory_efficient_layer_norm: False
  bias_dropout_fusion: False
  apply_rope_fusion: False
  recompute_granularity: null
  recompute_method: null
  recompute_num_layers: null
  distribute_saved_activations: null
  fp8: null
  moe_router_topk: 2
  moe_grouped_gemm: False
  moe_aux_loss_coeff: 0
  normalization: RMSNorm
model_parallel:
  context_parallel_size: 1
  data_parallel_size: 1
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 1
  sequence_parallel: True
  expert_model_parallel_size: 1
  perform_initialization: True
  use_cpu_initialization: null
  params_dtype: null
  timers: null
use_legacy_models: False
spec: null
micro_batch_size: 2
global_batch_size: 8
seq_length: 128
max_position_embeddings: 128
position_embedding_type: rope
train_iters: 10
lr: 0.001
lr_decay_style: cosine
min_lr: 1.0e-6
bf16: True
data_path: a_text_document
tokenizer_type: NullTokenizer
vocab_size: 1000
save_interval: 100
distributed_timeout_minutes: 10
use_flash_attn: True
untie_embeddings_and_output_weights: True
weight_decay: 0.1
"""

ARGUMENTS = """
--num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --ffn-hidden-size 128 --swiglu --normalization RMSNorm --apply-layernorm-1p
--attention-dropout 0 --hidden-dropout 0 --disable-bias-linear --max-position-embeddings 128
--position-embedding-type rope --seq-length 128 --untie-embeddings-and-output-weights
--vocab-size 1000 --tokenizer-type NullTokenizer --data-path a_text_document --micro-batch-size
2 --global-batch-size 8 --train-iters 10 --bf16 --lr 0.001 --min-lr 1e-6 --lr-decay-style cosine
--weight-decay 0.1 --tensor-model-parallel-size 2 --sequence-parallel --save-interval 100
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "gpt.yaml").write_text(YAML)
    return tmp_path / "gpt.yaml"


def test_yaml_file_gives_the_run_of_its_arguments(file: Path) -> None:
    from_yaml = translate(read_yaml_words(file), name="run")
    from_words = translate(ARGUMENTS.split(), name="run")
    assert from_yaml.refusals(strict=True) == from_words.refusals(strict=True) == []
    assert from_yaml.run is not None
    assert from_yaml.run == from_words.run
    assert (from_yaml.run.model.activation, from_yaml.run.model.num_kv_heads) == ("silu", 2)


def test_other_arguments_override_the_file(file: Path) -> None:
    for words in (["--yaml-cfg", str(file), "--lr", "0.5"], ["--lr", "0.5", f"--yaml-cfg={file}"]):
        run = translate(expand_yaml_flag(words), name="run").run
        assert run is not None and run.schedule.lr == 0.5
    assert expand_yaml_flag(["--lr", "1"]) == ["--lr", "1"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_layers: 4", "num_layers: x", "num_layers='x': expected a whole number"),
        ("num_layers: 4", "num_layerz: 4", "num_layerz: Megatron has no such argument"),
        ("activation_func: swiglu", "activation_func: tanh", "expected one of swiglu, squaredrelu"),
        ("activation_func: swiglu", "activation_func: [swiglu]", "expected one of swiglu"),
        (
            "activation_func: swiglu",
            "activation_func: gelu\n  gated_linear_unit: true",
            "swiglu is",
        ),
        ("bf16: True", "bf16: 3", "bf16=3: expected true or false"),
        ("model_parallel:", "model_parallel: 3\nother:", "model_parallel=3: expected a mapping"),
    ],
)
def test_invalid_values_are_reported_with_file_and_name(
    file: Path, old: str, new: str, message: str
) -> None:
    text = YAML.replace("  gated_linear_unit: False\n", "")
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as error:
        read_yaml_words(file)
    assert message in str(error.value) and str(file) in str(error.value)


def test_unreadable_files_and_repeated_flags_are_rejected(tmp_path: Path, file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        expand_yaml_flag(["--yaml-cfg", str(tmp_path / "none.yaml")])
    file.write_text("a: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        read_yaml_words(file)
    file.write_text("- 1")
    with pytest.raises(ConfigError, match="expected a mapping of arguments"):
        read_yaml_words(file)
    with pytest.raises(ConfigError, match="--yaml-cfg has no value. Use --yaml-cfg FILE"):
        expand_yaml_flag(["--yaml-cfg", "--lr"])
    with pytest.raises(ConfigError, match="given twice"):
        expand_yaml_flag(["--yaml-cfg", "a", "--yaml-cfg", "b"])
