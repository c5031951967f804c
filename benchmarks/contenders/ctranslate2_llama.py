"""ctranslate2 with the weights of a Hugging Face folder, if the package is installed."""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def is_installed() -> bool:
    """Whether ctranslate2 can be imported."""
    return find_spec("ctranslate2") is not None


SPECIAL_TOKENS = {0: "<unk>", 2: "<eos>"}
"""Special tokens have names that are no part of others, since they are replaced first."""


def token_name(token: int) -> str:
    """Return the text of a token in the vocabulary of `save_tokenizer`.

    >>> token_name(5)
    't5'
    """
    return SPECIAL_TOKENS.get(token, f"t{token}")


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Save a tokenizer whose tokens are words: <unk> t1 <eos> t3 ..."""
    vocab = {token_name(token): token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=token_name(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=token_name(0),
        bos_token=token_name(2),
        eos_token=token_name(2),
    ).save_pretrained(folder)


class CTranslate2Llama:
    """A converted Llama that generates greedily in fp32."""

    def __init__(self, folder: Path, vocab_size: int, *, threads: int) -> None:
        """`folder`: a Hugging Face folder without tokenizer, which is not changed."""
        from ctranslate2.converters import TransformersConverter

        source, converted = folder / "ctranslate2-source", folder / "ctranslate2"
        if not converted.exists():
            shutil.copytree(folder, source)
            save_tokenizer(source, vocab_size)
            TransformersConverter(str(source)).convert(str(converted))
        self._folder, self._threads = converted, threads
        self._generators: dict[bool, Any] = {}

    def generate(
        self, prompts: list[list[int]], new_tokens: int, *, batched: bool
    ) -> list[list[int]]:
        """Return the generated tokens.

        `batched`: all prompts in one batch with all threads; else as many at a time as there are
        threads, each with one.
        """
        results = self._generator(batched=batched).generate_batch(
            [[token_name(token) for token in prompt] for prompt in prompts],
            max_batch_size=0 if batched else 1,
            max_length=new_tokens,
            min_length=new_tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return [list(result.sequences_ids[0]) for result in results]

    def _generator(self, *, batched: bool) -> Any:  # ctranslate2.Generator
        import ctranslate2

        if batched not in self._generators:
            self._generators[batched] = ctranslate2.Generator(
                str(self._folder),
                compute_type="float32",
                inter_threads=1 if batched else self._threads,
                intra_threads=self._threads if batched else 1,
            )
        return self._generators[batched]
