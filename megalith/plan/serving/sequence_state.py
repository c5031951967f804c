"""State of one sequence in the scheduler: its tokens, and where its keys and values are stored."""

from dataclasses import dataclass, field

from megalith.plan.serving.prefix_cache import BlockHash


@dataclass(slots=True, eq=False)
class SequenceState:
    """One sequence: prompt, generated tokens and KV cache blocks.

    The caller sets the fields up to `one_token_after_prompt`. The scheduler owns all others, and
    changes `token_ids` only in `append_token`.
    """

    seq_id: int
    token_ids: list[int]
    """Prompt and generated tokens; a new sequence may start with generated ones."""

    num_prompt_tokens: int
    priority: int = 0
    """Lower values are served first."""

    salt: bytes = b""
    """Weight version, adapter, tenant: sequences with different salts share no cached blocks."""

    adapter: int | None = None
    """Number of its LoRA adapter, whose weights the salt identifies; None: the base model."""

    reads_prefix_cache: bool = True
    """Skip tokens that the prefix cache contains; False where the logits of all are needed."""

    recompute_length: int | None = None
    """When the sequence reaches this many tokens, its cache is dropped and it is prefilled again:
    LongRoPE has other rotary frequencies beyond the original context. None: never."""

    one_token_after_prompt: bool = False
    """Process tokens after the prompt one per step, also again after a preemption, and do not use
    the prefix cache."""

    num_computed_tokens: int = field(default=0, init=False)
    """Tokens whose keys and values are in the cache."""

    num_cached_tokens: int = field(default=0, init=False)
    """Tokens that the prefix cache contained when the sequence was first admitted."""

    num_preemptions: int = field(default=0, init=False)
    block_tables: list[list[int]] = field(default_factory=list, init=False)
    """Blocks of each KV cache group; -1 for blocks freed because no later query attends to them."""

    order: tuple[int, int, int] = field(default=(0, 0, 0), init=False)
    """(priority, arrival, number of the choice): the order of service."""

    is_running: bool = field(default=False, init=False)
    """Whether the sequence has a row; otherwise it waits, or is removed."""

    was_admitted: bool = field(default=False, init=False)
    uses_long_rope: bool = field(default=False, init=False)
    """Whether the sequence reached `recompute_length`."""

    capacity: int = field(default=0, init=False)
    """Number of tokens for which blocks are allocated."""

    shares_last_block: bool = field(default=False, init=False)
    """Whether the block of the next token may be shared with a fork, so that a write must copy."""

    block_hashes: list[BlockHash] = field(default_factory=list, init=False)
    """Hashes of the first full blocks, computed when they are needed."""

    registers_blocks: bool = field(default=False, init=False)
    """Whether blocks of this sequence may enter the prefix cache."""

    num_registered_blocks: int = field(default=0, init=False)
    """Leading blocks of each table that are in the prefix cache."""

    num_freed_blocks: list[int] = field(default_factory=list, init=False)
    """Leading blocks that were freed, for each windowed view."""

    failed_headroom: int = field(default=-1, init=False)
    """Available blocks when the sequence last could not be admitted; -1: no failed attempt."""

    @property
    def awaits_token(self) -> bool:
        """Whether all known tokens are processed, so that the next one is being sampled."""
        return self.is_running and self.num_computed_tokens >= len(self.token_ids)

    @property
    def accepts_drafts(self) -> bool:
        """Whether the next row processes one generated token, after which drafts may follow.

        After the last prompt token there are none, because choices of the prompt may fork.
        """
        num_computed = self.num_computed_tokens
        return (
            self.is_running
            and self.num_prompt_tokens <= num_computed == len(self.token_ids) - 1
            and not self.one_token_after_prompt
        )
