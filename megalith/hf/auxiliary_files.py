"""Auxiliary files of a model: tokenizer, generation settings, licenses and the chat template it was
tuned with.

A run on conversations adds two settings that no file of its base model has: the chat template, and
the tokens that end a turn.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalith import storage
from megalith.config.tokenizer import VOCABULARY
from megalith.data.chat_template import CONFIG_FILE, TEMPLATE_FILE, ChatTemplate, find_template
from megalith.data.huggingface import HuggingFaceTokenizer
from megalith.data.tokenizer import Tokenizer, build_tokenizer
from megalith.errors import DataError
from megalith.hf.folder import AUXILIARY_FILES, GENERATION, TOKENIZER_FILES
from megalith.hf.pretrained import Pretrained


def copy_auxiliary_files(
    source: Pretrained, token_ids: dict[str, Any], *, to_huggingface: bool
) -> dict[str, bytes]:  # Any: JSON
    """Return the contents of the auxiliary files of a model, by file name.

    A Hugging Face folder (`to_huggingface`) without a tokenizer gets no chat template, which it
    could not use.

    Raises:
        DataError: the tokenizer or the template that the model was trained with no longer exists.
    """
    files = {name: _read_checked(file) for name, file in source.auxiliary_files().items()}
    has_own_vocabulary_file = (
        not to_huggingface
        and source.checkpoint is not None
        and source.tokenizer.path == str(source.path / VOCABULARY)
    )
    if not has_own_vocabulary_file and (converted := _convert_gpt2_tokenizer(source, files)):
        # otherwise its config.yaml names the two files, which are copied
        files = converted | {
            name: contents for name, contents in files.items() if name in AUXILIARY_FILES
        }
    if source.tokenizer.kind == "null" or not source.tuning():
        return files
    tokenizer = build_tokenizer(source.tokenizer)
    template = find_own_template(source, tokenizer)
    if template is not None and not (to_huggingface and files.keys().isdisjoint(TOKENIZER_FILES)):
        files[TEMPLATE_FILE] = template.source.encode()
        if to_huggingface:
            files[CONFIG_FILE] = _add_template(files, template)
    stop_ids = find_turn_end(template or _tokenizer_template(source, tokenizer), tokenizer)[0]
    generation = (
        storage.parse_json(files[GENERATION])
        if GENERATION in files
        else _default_generation_config(token_ids)
    )
    files[GENERATION] = _encode_json(
        generation | {"eos_token_id": _add_stop_ids(generation.get("eos_token_id"), stop_ids)}
    )
    return files


def _read_checked(file: Path) -> bytes:
    """Read an auxiliary file, and check that it is valid JSON if its name says so.

    Raises:
        DataError: it is not.
    """
    contents = storage.read_bytes(file)
    if file.suffix == ".json":
        try:
            document = storage.parse_json(contents)
        except ValueError as error:
            raise DataError(
                f"{file}: not JSON ({error}). Copy the file again, or remove it."
            ) from error
        if not isinstance(document, dict) or (
            file.name == "tokenizer.json" and not isinstance(document.get("model"), dict)
        ):
            expected = "an object" if not isinstance(document, dict) else 'a "model" in it'
            raise DataError(
                f"{file}: expected {expected}, got {str(document)!r:.40}. Copy it again, or "
                "remove it."
            )
    return contents


def _convert_gpt2_tokenizer(source: Pretrained, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return tokenizer.json made from vocab.json and merges.txt, which only some libraries read."""
    if source.tokenizer.kind != "huggingface" or "tokenizer.json" in files:
        return {}
    tokenizer = build_tokenizer(source.tokenizer)
    return (
        tokenizer.to_files()
        if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.is_gpt2_format
        else {}
    )


def find_own_template(source: Pretrained, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the chat template saved with the weights, or the one named by their run; None: use the
    tokenizer's.

    Raises:
        DataError: the template file no longer exists.
    """
    template_file = source.path / TEMPLATE_FILE
    name = str(template_file) if template_file.is_file() else source.tuning().get("template")
    if not isinstance(name, str):
        return None
    try:
        return find_template(name, tokenizer, source.tokenizer.path, setting="data.sft.template")
    except DataError as error:
        raise DataError(
            f"{error} For a finished run, put the template into {template_file}, which has "
            "priority."
        ) from error


def find_turn_end(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[frozenset[int], str]:
    """Return what ends a turn: token ids, or a text if the tokenizer has no token for it."""
    end = template.turn_end()
    token_id = tokenizer.specials.get(end)
    return (frozenset(), end) if token_id is None else (frozenset({token_id}), "")


def _tokenizer_template(source: Pretrained, tokenizer: Tokenizer) -> ChatTemplate:
    return find_template(None, tokenizer, source.tokenizer.path, setting="data.sft.template")


def _add_template(files: dict[str, bytes], template: ChatTemplate) -> bytes:
    """Return tokenizer_config.json with the chat template, which transformers before 4.43 reads
    from there, and the special tokens that the template uses."""
    try:
        settings = storage.parse_json(
            files.get(CONFIG_FILE, b'{"tokenizer_class": "PreTrainedTokenizerFast"}')
        )
    except ValueError as error:
        raise DataError(
            f"{CONFIG_FILE}: not JSON ({error}). Use the file that came with the tokenizer."
        ) from error
    used_specials = {
        name: text for name, text in template.specials.items() if name in template.source
    }
    return _encode_json(used_specials | settings | {"chat_template": template.source})


def _default_generation_config(token_ids: dict[str, Any]) -> dict[str, Any]:
    """Return generation_config.json of a model that has none."""
    return {
        "_from_model_config": True,
        **{name: value for name, value in token_ids.items() if value is not None},
    }


def _add_stop_ids(
    eos_token_id: Any, stop_ids: frozenset[int]
) -> Any:  # JSON: a token id, a list, or null
    """Return eos_token_id with the tokens that end a turn added."""
    existing_ids = (
        eos_token_id
        if isinstance(eos_token_id, list)
        else []
        if eos_token_id is None
        else [eos_token_id]
    )
    all_ids = [*existing_ids, *sorted(stop_ids - set(existing_ids))]
    return eos_token_id if all_ids == existing_ids else all_ids[0] if len(all_ids) == 1 else all_ids


def _encode_json(contents: Any) -> bytes:  # JSON
    return (json.dumps(contents, indent=2, ensure_ascii=False) + "\n").encode()
