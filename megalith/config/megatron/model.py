"""Megatron's description of a GPT as our `model` settings: the sizes that follow from others, and what must be so."""

from megalith.config.megatron.draft import Draft


def translate_model(draft: Draft) -> None:
    """The sizes and choices of the network; the vocabulary belongs to the tokenizer."""
    draft.need("--num-layers", "the number of layers")
    draft.need("--hidden-size", "the features per token")
    draft.need("--num-attention-heads", "the number of query heads")
    draft.need("--max-position-embeddings", "the longest context")
    flags = ("--num-layers", "--hidden-size", "--num-attention-heads", "--kv-channels", "--max-position-embeddings")
    for flag in (*flags, "--norm-epsilon", "--init-method-std"):
        draft.copy(flag)
    _heads(draft)
    _mlp(draft)
    _positions(draft)
    _biases(draft)
    tied = not draft.arguments.value("--untie-embeddings-and-output-weights")
    draft.put("--untie-embeddings-and-output-weights", "model.tied_embeddings", tied)


def _heads(draft: Draft) -> None:
    grouped = draft.arguments.value("--group-query-attention")
    if grouped:
        draft.say("already", "--group-query-attention", "query heads share key/value heads")
        draft.put("--num-query-groups", "model.num_kv_heads", draft.arguments.value("--num-query-groups"))
    else:
        draft.put("--num-attention-heads", "model.num_kv_heads", draft.number("--num-attention-heads"))
        if draft.arguments.given("--num-query-groups"):
            draft.say("already", "--num-query-groups", "is read with --group-query-attention only")


def _mlp(draft: Draft) -> None:
    """SwiGLU and its width."""
    if not draft.arguments.value("--swiglu"):
        text = "the MLP here is SwiGLU; without this, Megatron's has one GELU. Use --swiglu"
        draft.say("not mapped", "--swiglu", text, "model")
    if draft.arguments.value("--ffn-hidden-size") is None:
        width = draft.number("--hidden-size") * 8 // 3 // 64 * 64  # for two matrices up, as wide as 4 h for one
        draft.put("--swiglu", "model.ffn_hidden_size", width, "8/3 of the hidden size, down to a multiple of 64")
    else:
        draft.copy("--ffn-hidden-size")
        if draft.arguments.value("--swiglu"):
            draft.say("already", "--swiglu", "the MLP is SwiGLU")


def _positions(draft: Draft) -> None:
    flag = "--position-embedding-type"
    old = "--use-rotary-position-embeddings"
    kind = "rope" if draft.arguments.value(old) else draft.arguments.value(flag)
    shown = old if draft.arguments.given(old) else flag
    if kind == "rope":
        draft.say("already", shown, "positions are rotary")
    else:
        draft.say("not mapped", shown, "positions here are rotary. Use --position-embedding-type rope", "model")
    draft.copy("--rotary-base")
    if draft.arguments.value("--use-rope-scaling"):
        factor = draft.arguments.value("--rope-scaling-factor")
        draft.put("--use-rope-scaling", "model.rope.scaling", "llama3")
        draft.put("--rope-scaling-factor", "model.rope.factor", factor)
        if factor != 8.0:
            text = "some releases of Megatron do not pass it on and scale by 8: compare with what your release does"
            draft.say("explained", "--rope-scaling-factor", text)
    elif draft.arguments.given("--rope-scaling-factor"):
        draft.say("already", "--rope-scaling-factor", "is read with --use-rope-scaling only")


def _biases(draft: Draft) -> None:
    linear = not draft.arguments.value("--disable-bias-linear")
    for setting in ("model.qkv_bias", "model.output_bias", "model.mlp_bias"):
        if setting == "model.qkv_bias" and draft.arguments.value("--add-qkv-bias") and not linear:
            draft.put("--add-qkv-bias", setting, True)
        else:
            draft.put("--disable-bias-linear", setting, linear)
