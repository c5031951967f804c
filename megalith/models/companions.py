"""What leaves with weights: tokenizer files, generation settings, licenses, and the template they
were tuned with.

A run on conversations decides two things that no file of its base says: the chat template, and
which token ends a turn.
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
from megalith.models.hf import AUXILIARY_FILES, GENERATION, TOKENIZER_FILES
from megalith.models.pretrained import Pretrained


def copy_auxiliary_files(
    source: Pretrained, token_ids: dict[str, Any], *, theirs: bool
) -> dict[str, bytes]:  # Any: JSON
    """Contents of the files that go with a model, by name; `theirs`: for a Hugging Face folder.

    A folder there without a tokenizer gets no chat template: nobody could use it.

    Raises:
        DataError: the tokenizer that the model was trained with is gone, or the template.
    """
    files = {name: _intact(file) for name, file in source.auxiliary_files().items()}
    copied = (
        not theirs
        and source.checkpoint is not None
        and source.tokenizer.path == str(source.path / VOCABULARY)
    )
    if not copied and (
        made := _of_gpt2(source, files)
    ):  # else its config.yaml names the two files, which go with it
        files = made | {
            name: contents for name, contents in files.items() if name in AUXILIARY_FILES
        }
    if source.tokenizer.kind == "null" or not source.tuning():
        return files
    tokenizer = build_tokenizer(source.tokenizer)
    template = own_template(source, tokenizer)
    if template is not None and not (theirs and files.keys().isdisjoint(TOKENIZER_FILES)):
        files[TEMPLATE_FILE] = template.source.encode()
        if theirs:
            files[CONFIG_FILE] = _with_template(files, template)
    ends = turn_ends(template or _of_tokenizer(source, tokenizer), tokenizer)[0]
    generation = storage.parse_json(files[GENERATION]) if GENERATION in files else _plain(token_ids)
    files[GENERATION] = _document(
        generation | {"eos_token_id": _with_ends(generation.get("eos_token_id"), ends)}
    )
    return files


def _intact(file: Path) -> bytes:
    """What a file holds.

    Raises:
        DataError: its name promises JSON, and it is none: whoever reads the copy would stumble over
        it.
    """
    contents = storage.read_bytes(file)
    if file.suffix == ".json":
        try:
            found = storage.parse_json(contents)
        except ValueError as error:
            raise DataError(
                f"{file}: not JSON ({error}). Copy it again, or remove it to go without it."
            ) from error
        if not isinstance(found, dict) or (
            file.name == "tokenizer.json" and not isinstance(found.get("model"), dict)
        ):
            part = "an object" if not isinstance(found, dict) else 'a "model" in it'
            raise DataError(
                f"{file}: expected {part}, found {str(found)!r:.40}. Copy it again, or remove it."
            )
    return contents


def _of_gpt2(source: Pretrained, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """A tokenizer of two files as the one file that every library reads, whatever the model beside
    it is called."""
    if source.tokenizer.kind != "huggingface" or "tokenizer.json" in files:
        return {}
    tokenizer = build_tokenizer(source.tokenizer)
    return (
        tokenizer.written()
        if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.of_gpt2
        else {}
    )


def own_template(source: Pretrained, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that lies beside the weights, else the one that the run which made them names;
    None: the tokenizer's own, if it has one.

    Raises:
        DataError: there is no such file any more.
    """
    beside = source.path / TEMPLATE_FILE
    named = str(beside) if beside.is_file() else source.tuning().get("template")
    if not isinstance(named, str):
        return None
    try:
        return find_template(named, tokenizer, source.tokenizer.path, setting="data.sft.template")
    except DataError as error:
        raise DataError(
            f"{error} A run that is over reads {beside} first: put the template there."
        ) from error


def turn_ends(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[frozenset[int], str]:
    """What ends a turn: tokens, or a text where the tokenizer has no token for it."""
    end = template.turn_end()
    number = tokenizer.specials.get(end)
    return (frozenset(), end) if number is None else (frozenset({number}), "")


def _of_tokenizer(source: Pretrained, tokenizer: Tokenizer) -> ChatTemplate:
    return find_template(None, tokenizer, source.tokenizer.path, setting="data.sft.template")


def _with_template(files: dict[str, bytes], template: ChatTemplate) -> bytes:
    """tokenizer_config.json with the template, which transformers before 4.43 looks for there,
    and with the special tokens that it asks for."""
    try:
        settings = storage.parse_json(
            files.get(CONFIG_FILE, b'{"tokenizer_class": "PreTrainedTokenizerFast"}')
        )
    except ValueError as error:
        raise DataError(
            f"{CONFIG_FILE}: not JSON ({error}). Use the file that came with the tokenizer."
        ) from error
    asked = {name: text for name, text in template.specials.items() if name in template.source}
    return _document(asked | settings | {"chat_template": template.source})


def _plain(token_ids: dict[str, Any]) -> dict[str, Any]:
    """generation_config.json of a model that came with none."""
    return {
        "_from_model_config": True,
        **{name: value for name, value in token_ids.items() if value is not None},
    }


def _with_ends(before: Any, ends: frozenset[int]) -> Any:  # JSON: a number, several, or none
    """PackedSeqParams that end a text, with those that end a turn."""
    known = before if isinstance(before, list) else [] if before is None else [before]
    both = [*known, *sorted(ends - set(known))]
    return before if both == known else both[0] if len(both) == 1 else both


def _document(contents: Any) -> bytes:  # JSON
    return (json.dumps(contents, indent=2, ensure_ascii=False) + "\n").encode()
