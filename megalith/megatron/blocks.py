"""Megatron's file of layers that are not all alike as our `model.layers`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalith import storage
from megalith.config.block_configs import BlockModelSizes, read_blocks
from megalith.megatron.draft import Draft, FlagReport

PATH, TEXT = "--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json"
GROUPS, WIDTH = "--num-query-groups", "--ffn-hidden-size"
COUNTS = ("--num-layers", "--num-attention-heads", "--hidden-size")
SETTINGS = ("attention", "mlp", "num_kv_heads", "ffn_hidden_size")

LAYERS_ASK: tuple[tuple[str, str, object, str], ...] = (
    ("--swiglu", "model.activation", "silu", "--swiglu"),
    ("--swiglu", "model.gated", True, "--swiglu"),
    ("--normalization", "model.norm", "rms", "--normalization RMSNorm"),
    ("--position-embedding-type", "model.positions", "rope", "--position-embedding-type rope"),
    ("--rotary-percent", "model.rope.fraction", 1.0, "--rotary-percent 1.0"),
)
"""(flag, setting, the required value, the flag that sets it): what Megatron requires beside such
a file."""

FILE_SAYS: tuple[tuple[str, str, str], ...] = (
    ("num_hidden_layers", "--num-layers", "model.num_layers"),
    ("hidden_size", "--hidden-size", "model.hidden_size"),
    ("num_attention_heads", "--num-attention-heads", "model.num_heads"),
    ("rope_theta", "--rotary-base", "model.rope.theta"),
)
"""(field of the file, flag, setting) that must be equal where the file has the field."""


TEXT_ALONE = (
    "layers are here as it says. Megatron compares it with the other arguments, but builds equal "
    f"layers unless {PATH} "
    f"is given, too. Use {PATH} with a file of this text"
)
"""What to know of a text without a file."""


def translate_blocks(draft: Draft) -> None:
    """What a file, or its text, says of each layer; nothing where there is none. All that does not
    fit is reported.

    Megatron reads the file where there is no text, and gives layers sizes of their own where a file
    is named.
    """
    flag = PATH if draft.arguments.value(TEXT) is None else TEXT
    if draft.arguments.value(flag) is None:
        return
    document = _document(draft, flag)
    if document is None:
        return
    if flag == TEXT and draft.arguments.given(PATH):
        draft.say("already", PATH, f"{TEXT} is read in its place")
    draft.problems += [f"{flag}: {text}" for text in (*_asked(draft), *_unequal(draft, document))]
    if all(draft.sure(name) for name in COUNTS):
        _put(draft, flag, document)


def _put(draft: Draft, flag: str, document: Mapping[str, Any]) -> None:
    layers, heads, hidden = (draft.number(name) for name in COUNTS)
    keys, width = (draft.settings.get(f"model.{name}") for name in SETTINGS[2:])
    sizes = BlockModelSizes(
        num_layers=layers,
        num_heads=heads,
        hidden_size=hidden,
        num_kv_heads=keys if isinstance(keys, int) else None,
        ffn_hidden_size=width if isinstance(width, int) else None,
    )
    blocks = read_blocks(document.get("block_configs"), sizes)
    if blocks.problems:
        draft.problems += [f"{flag}: {text} Use a file that says so." for text in blocks.problems]
        return
    draft.problems += [
        f"{flag}: {text}" for text in _other_groups(draft, document, blocks.num_kv_heads)
    ]
    patterns = {f"model.layers.{name}": list(getattr(blocks.layers, name)) for name in SETTINGS}
    for setting, pattern in patterns.items():
        if pattern:
            draft.put(flag, setting, pattern)
    changed = [
        _overrule(draft, flag, "model.num_kv_heads", blocks.num_kv_heads, "the most of any layer"),
        _overrule(
            draft, flag, "model.ffn_hidden_size", blocks.ffn_hidden_size, "the widest of any layer"
        ),
    ]
    if changed[1] and draft.arguments.given(WIDTH):
        draft.say("already", WIDTH, f"is read for layers that have no width in {flag} only")
    if (
        flag == TEXT
        and not draft.arguments.given(PATH)
        and (any(changed) or any(patterns.values()))
    ):
        draft.entries.append(
            FlagReport(verdict="explained", flag=TEXT, text=TEXT_ALONE, effect="numbers")
        )


def _overrule(draft: Draft, flag: str, setting: str, value: int, text: str) -> bool:
    """Is the setting another than the other arguments have it? Then their lines go, and one for the
    file comes."""
    if draft.settings.get(setting) == value:
        return False
    draft.entries = [entry for entry in draft.entries if entry.setting != setting]
    draft.put(flag, setting, value, text)
    return True


def _document(draft: Draft, flag: str) -> Mapping[str, Any] | None:
    """The JSON object that the flag names or is; None, and a problem, where there is none."""
    given = str(draft.arguments.value(flag))
    try:
        text = storage.read_text(Path(given), allow_pipe=True) if flag == PATH else given
        document = storage.parse_json(text)
    except (OSError, ValueError) as error:
        draft.problems.append(
            f"{flag} {given:.60}: {error}. Pass a JSON object with block_configs."
        )
        return None
    if isinstance(document, dict):
        return document
    draft.problems.append(
        f"{flag} {given:.60} holds {document!r:.40}, expected a JSON object with block_configs."
    )
    return None


def _asked(draft: Draft) -> list[str]:
    """What such layers need and the other arguments say otherwise."""
    settings = draft.settings
    problems = {
        f"these layers need {how}, and {setting} would be {settings[setting]!r}. Pass {how}.": None
        for flag, setting, value, how in LAYERS_ASK
        if settings.get(setting, value) != value
    }
    for flag in ("--multi-latent-attention", "--num-experts"):
        if draft.arguments.value(flag):
            typed = draft.arguments.typed(flag)
            problems[f"blocks have no word for {typed}. Remove {flag}, or the file of layers."] = (
                None
            )
    return list(problems)


def _unequal(draft: Draft, document: Mapping[str, Any]) -> list[str]:
    """Where the file and the other arguments describe two models."""
    problems = [
        f"{field}={document[field]!r}, and {flag} makes it {draft.settings[setting]!r}. Set {flag} "
        f"to {document[field]!r}."
        for field, flag, setting in FILE_SAYS
        if document.get(field) is not None
        and setting in draft.settings
        and draft.settings[setting] != document[field]
    ]
    flag, tied = (
        "--untie-embeddings-and-output-weights",
        draft.settings.get("model.tied_embeddings"),
    )
    if (
        isinstance(document.get("tie_word_embeddings"), bool)
        and document["tie_word_embeddings"] != tied
    ):
        what = "Remove" if tied is False else "Pass"
        problems.append(
            f"tie_word_embeddings={document['tie_word_embeddings']}, the other way round. {what} "
            f"{flag}."
        )
    return problems + _scaled_otherwise(draft, document.get("rope_scaling"))


def _other_groups(draft: Draft, document: Mapping[str, Any], most: int) -> list[str]:
    """Key/value heads, where the other arguments have the same query heads but not as many of
    these."""
    setting, heads = "model.num_kv_heads", draft.settings["model.num_heads"]
    ours = draft.settings.get(setting)
    if (
        not draft.sure(setting)
        or ours == most
        or document.get("num_attention_heads") not in (None, heads)
    ):
        return []
    if draft.arguments.value("--group-query-attention"):
        return [
            f"block_configs has {most} key/value heads, and {GROUPS} makes it {ours}. Set {GROUPS} "
            f"to {most}."
        ]
    how = f"--group-query-attention {GROUPS} {most}"
    return [f"block_configs has {most} key/value heads, and there would be {ours}. Pass {how}."]


def _scaled_otherwise(draft: Draft, scaling: object) -> list[str]:
    """Stretched positions: those of Llama 3 by the file's factor, or none."""
    factor = scaling.get("factor") if isinstance(scaling, dict) else None
    if factor is None:
        return []
    kind, ours = draft.settings.get("model.rope.scaling"), draft.settings.get("model.rope.factor")
    if kind == "llama3" and ours == factor:
        return []
    shown = "not stretched" if kind is None else f"stretched by {kind}, {ours}"
    return [
        f"rope_scaling.factor={factor!r}, and positions would be {shown}. Pass --use-rope-scaling "
        f"--rope-scaling-factor {factor}."
    ]
