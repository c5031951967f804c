"""Megatron's description of first weights and of muP as our settings."""

from megalith.megatron.draft import Draft


def translate_initial(draft: Draft) -> None:
    """Spreads of first values, and what changes with the width."""
    arguments, xavier = draft.arguments, "--init-method-xavier-uniform"
    draft.copy("--init-method-std")
    draft.copy("--embedding-init-method-std")
    if arguments.value(xavier):
        draft.put(xavier, "model.init", "xavier_uniform", "tables keep their own spread")
    if arguments.value("--use-mup"):
        _mup(draft)


def _mup(draft: Draft) -> None:
    """Without a base, Megatron's is as wide as the model, or narrower by --mup-width-mult."""
    arguments, base, wider = draft.arguments, "--mup-base-hidden-size", "--mup-width-mult"
    hidden, times = draft.number("--hidden-size"), float(str(arguments.value(wider)))
    width = arguments.value(base)
    flag = base if width is not None else wider
    width = width if isinstance(width, int) else round(hidden / times) if times > 0 else 0
    draft.put(flag, "model.mup.base_hidden_size", width, of=("--hidden-size",))
    if not arguments.value(
        "--multi-latent-attention"
    ):  # whose scores Megatron scales by their features alone
        draft.copy("--mup-base-head-dim")
        draft.copy("--mup-attn-scale-power")
    draft.copy("--mup-embedding-mult")
    output = arguments.value("--mup-output-mult")
    if output != 1.0:
        value = float(str(output)) * hidden / max(width, 1)
        draft.put(
            "--mup-output-mult",
            "model.logit_scale",
            value,
            "times the width, by which muP divides here",
        )
