"""Naive executor and random workload that check every plan of the scheduler.

The executor simulates the block pool: each slot of a block holds a value that identifies the token,
its position, all tokens before it, and the salt. Before a row is processed, all values that its
queries attend to must be those of its own sequence.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from megalith.plan.serving.cache_layout import AttentionView
from megalith.plan.serving.scheduler import (
    PlannedRow,
    Scheduler,
    SchedulerConfig,
    SequenceState,
    StepPlan,
)


class WrongPlanError(AssertionError):
    """A plan that would compute a wrong result, or violates the policy."""


def require(condition: bool, message: str) -> None:
    """Raise WrongPlanError with the message unless the condition holds."""
    if not condition:
        raise WrongPlanError(message)


@dataclass
class Request:
    """What the naive model knows of a sequence."""

    state: SequenceState
    salt: bytes
    token_ids: list[int]
    num_prompt_tokens: int
    max_total_tokens: int
    priority: int
    arrival: tuple[int, int]
    recompute_length: int | None
    one_token_after_prompt: bool
    num_computed: int = 0
    is_running: bool = False
    is_long: bool = False
    was_planned: bool = False
    values: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Weight version with which each computed token was processed."""

    @property
    def order(self) -> tuple[int, tuple[int, int]]:
        return (self.priority, self.arrival)

    def update_values(self) -> None:
        """Compute the values of all tokens: each depends on all tokens before it."""
        del self.versions[self.num_computed :]  # of rejected drafts
        is_long = self.recompute_length is not None and len(self.token_ids) >= self.recompute_length
        if is_long and not self.is_long:
            self.is_long, self.values, self.num_computed = True, [], 0
        for position in range(len(self.values), len(self.token_ids)):
            self.values.append(self.hash_token(self.values, position, self.token_ids[position]))

    def hash_token(self, before: list[int], position: int, token: int) -> int:
        """Return the value of a token after tokens with the values `before`."""
        last = before[-1] if before else hash((self.salt, self.is_long))
        return hash((last, position, token))

    def values_with_drafts(self, draft_ids: tuple[int, ...]) -> list[int]:
        """Return the values of all tokens, and of drafts after them."""
        values = list(self.values)
        for position, token in enumerate(draft_ids, len(values)):
            values.append(self.hash_token(values, position, token))
        return values


class Executor:
    """Simulated forward pass over a pool of blocks."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.weight_version = 0
        self.blocks: list[list[tuple[int, int] | None]] = [
            [None] * config.block_size for _ in range(config.num_blocks)
        ]
        self.host_blocks: list[list[tuple[int, int] | None]] = [
            [None] * config.block_size for _ in range(config.num_host_blocks)
        ]

    def transfer_blocks(self, plan: StepPlan) -> None:
        """Copy blocks to host memory, then from it."""
        written = [copy.destination for copy in plan.offloads]
        loaded = [copy.destination for copy in plan.loads]
        for numbers in (written, loaded):
            require(len(set(numbers)) == len(numbers), "two transfers have one destination")
        is_read = {copy.source for copy in plan.loads}
        require(not is_read & set(written), "a block is loaded and overwritten by an offload")
        require(
            not {copy.destination for copy in plan.copies} & set(loaded), "a loaded block is a copy"
        )
        for copy in plan.offloads:
            self.host_blocks[copy.destination] = list(self.blocks[copy.source])
        for copy in plan.loads:
            self.blocks[copy.destination] = list(self.host_blocks[copy.source])

    def copy_blocks(self, plan: StepPlan) -> None:
        """Copy all at once: read every source, then write every destination."""
        destinations = [copy.destination for copy in plan.copies]
        sources = {copy.source for copy in plan.copies}
        require(len(set(destinations)) == len(destinations), "two copies have one destination")
        require(not sources & set(destinations), "a destination is a source")
        contents = [list(self.blocks[copy.source]) for copy in plan.copies]
        for destination, content in zip(destinations, contents):
            self.blocks[destination] = content

    def write(self, row: PlannedRow, request: Request) -> None:
        """Store the values of the row's tokens in every group."""
        end = row.start + row.count
        request.versions[row.start :] = [self.weight_version] * row.count
        values = request.values_with_drafts(row.draft_ids)
        for table in row.block_tables:
            for position in range(row.start, end):
                block = table[position // self.config.block_size]
                require(block >= 0, f"request {row.seq_id} writes to a freed block")
                slot = position % self.config.block_size
                self.blocks[block][slot] = (values[position], self.weight_version)

    def read(self, row: PlannedRow, request: Request) -> None:
        """Check the values that the queries of the row attend to."""
        require(len(row.block_tables) == len(self.config.groups), "a block table is missing")
        values = request.values_with_drafts(row.draft_ids)
        for view, table in zip(self.config.groups, row.block_tables):
            for query in range(row.start, row.start + row.count):
                for position in range(query - view.before(query), query + 1):
                    block = table[position // self.config.block_size]
                    require(block >= 0, f"query {query} attends to freed token {position}")
                    value = self.blocks[block][position % self.config.block_size]
                    require(
                        value == (values[position], request.versions[position]),
                        f"request {row.seq_id}, query {query}, {view}: wrong value at "
                        f"position {position} in block {block}",
                    )


class Workload:
    """Random operations on a scheduler, each compared with the naive model."""

    def __init__(
        self,
        config: SchedulerConfig,
        seed: int,
        *,
        scheduler: type[Scheduler] = Scheduler,
        max_in_flight: int = 1,
    ) -> None:
        """`max_in_flight`: steps that are executed before the tokens of the first are sampled."""
        self.config = config
        self.random = random.Random(seed)
        self.scheduler = scheduler(config)
        self.executor = Executor(config)
        self.requests: dict[int, Request] = {}
        self.max_in_flight = max_in_flight
        self.in_flight: deque[StepPlan] = deque()
        self.next_id = 0
        self.arrivals = 0
        self.counts: dict[str, int] = {}
        self.checks_blocks = True
        """Whether invariants of allocator and prefix cache are verified after every operation."""

        self.longest = min(60, self.scheduler.cache.find_longest_sequence())
        self.prompts = [[self.random.randrange(3) for _ in range(self.longest)] for _ in range(3)]

    def run(self, num_operations: int) -> None:
        """Run random operations, then finish all requests and verify that no block is used."""
        operations = {
            self.add: 3,
            self.step: 12,
            self.discard: 1,
            self.abort: 0.6,
            self.abort_in_step: 0.3,
            self.reset: 0.3,
        }
        weights = list(operations.values())
        for operation in self.random.choices(list(operations), weights, k=num_operations):
            if operation == self.add and len(self.requests) > 12:
                operation = self.step
            self.count(operation.__name__)
            operation()
            self.check()
        self.drain()

    def drain(self, limit: int = 3000) -> None:
        """Step until every request has its last token."""
        for _ in range(limit):
            if not self.requests:
                break
            self.step()
            self.check()
        require(not self.requests, "requests do not finish")
        stats = self.scheduler.make_stats()
        require(stats.num_used_blocks == 0, f"{stats.num_used_blocks} blocks are never freed")
        require(stats.num_running == stats.num_waiting == 0, "finished requests are queued")
        self.check()

    def count(self, name: str, amount: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount

    def check(self) -> None:
        if self.checks_blocks:
            self.scheduler.check()

    def make_tokens(self) -> list[int]:
        """Return a prompt: often a prefix of an earlier text, so that the prefix cache hits."""
        length = self.random.randrange(1, self.longest + 1)
        text = list(self.random.choice(self.prompts)[:length])
        if self.random.random() < 0.3:
            text[self.random.randrange(len(text))] = self.random.randrange(3)
        return text

    def add(self) -> None:
        tokens = self.make_tokens()
        state = SequenceState(
            seq_id=self.next_id,
            token_ids=list(tokens),
            num_prompt_tokens=len(tokens),
            priority=self.random.choice([0, 0, 0, 1, 2, -1]),
            salt=self.random.choice([b"", b"", b"weights=1", b"adapter=a"]),
            reads_prefix_cache=self.random.random() < 0.9,
            recompute_length=self.random.choice([None, None, None, self.longest // 2]),
            one_token_after_prompt=self.random.random() < 0.05,
        )
        total = min(len(tokens) + self.random.randrange(1, 12), self.longest + 1)
        self.scheduler.add(state, max_total_tokens=total)
        self.enter(state, total, (self.arrivals, 0))
        self.arrivals += 1

    def enter(self, state: SequenceState, total: int, arrival: tuple[int, int]) -> None:
        self.next_id += 1
        self.requests[state.seq_id] = Request(
            state,
            state.salt,
            list(state.token_ids),
            state.num_prompt_tokens,
            total,
            state.priority,
            arrival,
            state.recompute_length,
            state.one_token_after_prompt,
        )
        self.requests[state.seq_id].update_values()

    def make_plan(self) -> StepPlan:
        """Schedule a step and check the plan against the model and the policy."""
        limit = self.random.choice([None] * 9 + [1, 5])
        first = min(self.requests, key=lambda key: self.requests[key].order, default=None)
        drafts = {seq_id: self.make_drafts(request) for seq_id, request in self.requests.items()}
        max_rows = None if self.max_in_flight == 1 else self.random.choice([None, 1, 3])
        awaiting = {
            seq_id for seq_id, request in self.requests.items() if request.state.awaits_token
        }
        plan = self.scheduler.schedule(max_prefill_tokens=limit, max_rows=max_rows, drafts=drafts)
        require(max_rows is None or len(plan.rows) <= max_rows, "too many rows")
        rows = {row.seq_id for row in plan.rows}
        require(not awaiting & rows, "a request that awaits its token has a row")
        require(not awaiting & {*plan.preempted}, "a request that awaits its token is preempted")
        for seq_id in plan.preempted:
            self.requests[seq_id].is_running = False
            self.requests[seq_id].num_computed = 0
            require(seq_id != first, "the first request was preempted")
            self.count("preempted")
        self.check_policy(plan, first)
        self.check_admissions()
        for row in plan.rows:
            self.check_row(row)
        for request in self.requests.values():
            request.is_running = request.state.is_running
        return plan

    def make_drafts(self, request: Request) -> list[int]:
        """Return drafts within the length of a request: often none, sometimes more than fit."""
        longest = request.max_total_tokens - len(request.token_ids) - 1
        num_drafts = self.random.choice([0, 0, 1, 2, 5, 30])
        return [self.random.randrange(3) for _ in range(min(longest, num_drafts))]

    def check_admissions(self) -> None:
        """Waiting requests, preempted ones included, are admitted in the order of service."""
        admitted = [r.order for r in self.requests.values() if r.state.is_running > r.is_running]
        waiting = [r.order for r in self.requests.values() if not r.state.is_running]
        if admitted and waiting:
            require(max(admitted) < min(waiting), "a request was admitted out of order")

    def check_policy(self, plan: StepPlan, first: int | None) -> None:
        rows = {row.seq_id: row for row in plan.rows}
        require(len(rows) == len(plan.rows), "a request has two rows")
        require(not set(rows) & set(plan.preempted), "a preempted request has a row")
        orders = sorted(self.requests[seq_id].order for seq_id in rows)
        for seq_id in plan.preempted:
            is_last = not orders or self.requests[seq_id].order > orders[-1]
            require(is_last, "a request before another one was preempted")
        require(len(rows) <= self.config.max_num_seqs, "too many rows")
        require(plan.num_tokens <= self.config.max_num_batched_tokens, "too many tokens")
        kinds = [row.count == 1 + len(row.draft_ids) and row.samples for row in plan.rows]
        require(kinds == sorted(kinds, reverse=True), "a decode row follows a prefill")
        for kind in (True, False):
            part = [self.requests[r.seq_id].order for r, k in zip(plan.rows, kinds) if k == kind]
            require(part == sorted(part), "rows are not in the order of service")
        if self.config.batching == "continuous" and first is not None and not self.in_flight:
            require(first in rows, "the first request does not advance")
        smallest = self.config.min_prefill_chunk_tokens
        for row in plan.rows:
            request = self.requests[row.seq_id]
            is_last_chunk = row.samples or request.one_token_after_prompt
            is_first = request.order == orders[0]
            if row.count < smallest and not is_last_chunk:
                require(is_first, f"{row} is smaller than the smallest chunk")
                self.count("small_chunk")
        for seq_id, request in self.requests.items():
            is_decode = len(request.token_ids) - request.num_computed == 1
            if request.is_running and is_decode and self.max_in_flight == 1:
                require(seq_id in rows, f"request {seq_id} skips a decode step")

    def check_row(self, row: PlannedRow) -> None:
        request = self.requests[row.seq_id]
        if not request.num_computed and row.start:
            require(row.start % self.config.block_size == 0, "a hit is not a number of blocks")
            require(not request.one_token_after_prompt, "the prefix cache is used")
            require(self.config.prefix_caching, "the prefix cache is used")
            request.versions = [self.executor.weight_version] * row.start
            self.count("hit")
        else:
            require(row.start == request.num_computed, f"{row} starts at a wrong position")
        end = row.start + row.count - len(row.draft_ids)
        require(end > row.start, f"{row} has no tokens")
        require(end <= len(request.token_ids), f"{row} has unknown tokens")
        require(row.samples == (end == len(request.token_ids)), f"{row}.samples is wrong")
        if request.one_token_after_prompt:
            is_prompt = end <= request.num_prompt_tokens
            require(is_prompt or row.count == 1, f"{row} processes several tokens")
            require(not row.draft_ids, f"{row} has drafts")
        if row.draft_ids:
            is_decode = row.samples and end == row.start + 1 > request.num_prompt_tokens
            require(is_decode, f"the drafts of {row} follow a prefill")
            length = request.recompute_length
            is_short = length is None or request.is_long or end + len(row.draft_ids) < length
            require(is_short, f"a draft of {row} has other rotary frequencies")
            self.count("drafts", len(row.draft_ids))
        if not request.was_planned and self.config.batching == "continuous":
            num_cached = request.state.num_cached_tokens
            require(num_cached == row.start, f"num_cached_tokens={num_cached} for {row}")
        request.was_planned = True
        for view, table in zip(self.config.groups, row.block_tables):
            if view.window is not None:
                size = self.config.block_size
                num_held = sum(block >= 0 for block in table[: -(-end // size)])
                limit = -(-(view.window + row.count) // size) + 1
                require(num_held <= limit, f"a windowed group holds {num_held} blocks")

    def transfer(self, plan: StepPlan) -> StepPlan:
        """Execute the transfers of a plan, some of which fail; returns the plan that remains."""
        self.executor.transfer_blocks(plan)
        loaded = [copy for copy in plan.loads if self.random.random() > 0.2]
        failed = set(plan.loads) - set(loaded) if self.random.random() < 0.2 else set()
        self.count("loads", len(plan.loads))
        self.count("failed_loads", len(failed))
        if not failed:
            return plan
        for copy in failed:
            self.executor.blocks[copy.destination] = [None] * self.config.block_size
        plan = self.scheduler.fail_loads(plan, failed)
        self.drop_requeued()
        self.check()
        return plan

    def drop_requeued(self) -> None:
        """Reset the requests whose prefix was not loaded."""
        for request in self.requests.values():
            if request.is_running and not request.state.is_running:
                request.is_running, request.num_computed = False, 0
                request.was_planned = request.state.was_admitted
                self.count("requeued")

    def execute(self, plan: StepPlan) -> StepPlan:
        plan = self.transfer(plan)
        self.executor.copy_blocks(plan)
        rows = [row for row in plan.rows if row.seq_id in self.requests]
        self.count("copies", len(plan.copies))
        for row in rows:
            self.executor.write(row, self.requests[row.seq_id])
        for row in rows:
            self.executor.read(row, self.requests[row.seq_id])
        return plan

    def step(self) -> None:
        """Schedule, execute, complete and append the sampled tokens."""
        plan = self.execute(self.make_plan())
        self.complete(plan)
        self.append_oldest(plan)

    def append_oldest(self, plan: StepPlan) -> None:
        """Append the tokens of the oldest step in flight, if `plan` is empty or the last step that
        may be in flight."""
        if self.in_flight and (not plan.rows or len(self.in_flight) == self.max_in_flight):
            self.append_tokens(self.in_flight.popleft())

    def complete(self, plan: StepPlan) -> None:
        self.scheduler.complete(plan)
        self.count("offloads", len(plan.offloads))
        num_offloaded = self.scheduler.make_stats().num_offloaded_blocks
        require(num_offloaded == self.counts["offloads"], "offloaded blocks are miscounted")
        self.count("in_flight", bool(plan.rows and self.in_flight))
        for row in plan.rows:
            if row.seq_id in self.requests:
                request = self.requests[row.seq_id]
                request.num_computed = row.start + row.count - len(row.draft_ids)
        if plan.rows:
            self.in_flight.append(plan)

    def append_tokens(self, plan: StepPlan) -> None:
        for row in plan.rows:
            if row.seq_id not in self.requests or not row.samples:
                continue
            request = self.requests[row.seq_id]
            if request.num_computed == request.num_prompt_tokens and self.random.random() < 0.3:
                self.fork(row.seq_id)
            self.verify(row)
            self.sample(row.seq_id)

    def verify(self, row: PlannedRow) -> None:
        """Accept some of the drafts of a row; those after them are rejected."""
        request = self.requests[row.seq_id]
        num_accepted = self.random.randint(0, len(row.draft_ids))
        for token in row.draft_ids[:num_accepted]:
            request.token_ids.append(token)
            request.num_computed += 1
            self.scheduler.append_token(row.seq_id, token, is_cached=True)
            self.check()
        self.count("accepted", num_accepted)
        self.count("rejected", len(row.draft_ids) - num_accepted)

    def sample(self, seq_id: int) -> None:
        request = self.requests[seq_id]
        request.token_ids.append(self.random.randrange(3))
        if len(request.token_ids) >= request.max_total_tokens:
            del self.requests[seq_id]
            self.scheduler.finish(seq_id)
            return
        self.scheduler.append_token(seq_id, request.token_ids[-1])
        request.update_values()
        if request.is_running:
            num_held = max((len(table) for table in request.state.block_tables), default=0)
            num_needed = -(-request.num_computed // self.config.block_size)
            require(num_held <= num_needed, f"request {seq_id} keeps blocks of rejected drafts")

    def fork(self, parent_id: int) -> None:
        """Fork one to three children; each gets its own first token."""
        parent = self.requests[parent_id]
        for _ in range(self.random.randrange(1, 4)):
            child = SequenceState(
                seq_id=self.next_id,
                token_ids=parent.token_ids[: parent.num_prompt_tokens],
                num_prompt_tokens=parent.num_prompt_tokens,
                priority=parent.priority,
                salt=parent.salt,
                recompute_length=parent.recompute_length,
                one_token_after_prompt=parent.one_token_after_prompt,
            )
            self.scheduler.fork(parent_id, child)
            major, minor = parent.arrival
            self.enter(child, parent.max_total_tokens, (major, minor + 1 + self.next_id))
            request = self.requests[child.seq_id]
            request.was_planned = True  # a choice reports no cached tokens
            if child.is_running:
                request.num_computed, request.is_running = parent.num_prompt_tokens, True
                request.versions = parent.versions[: parent.num_prompt_tokens]
                self.count("fork")
            self.check()
            self.sample(child.seq_id)

    def discard(self) -> None:
        """A forward pass fails before or after its copies and some of its writes; the newest
        prefill may be the cause and is then aborted."""
        plan = self.make_plan()
        if self.random.random() < 0.5:
            self.executor.transfer_blocks(plan)
            self.executor.copy_blocks(plan)
            for row in plan.rows[::2]:
                self.executor.write(row, self.requests[row.seq_id])
        self.scheduler.discard(plan)
        for row in plan.rows:
            self.requests[row.seq_id].num_computed = row.start
        self.drop_requeued()
        if plan.rows and self.random.random() < 0.5:
            del self.requests[plan.rows[-1].seq_id]
            self.scheduler.finish(plan.rows[-1].seq_id)

    def abort(self) -> None:
        if self.requests:
            seq_id = self.random.choice(list(self.requests))
            del self.requests[seq_id]
            self.scheduler.finish(seq_id)

    def abort_in_step(self) -> None:
        """Abort a request between schedule and complete, or discard."""
        plan = self.make_plan()
        self.abort()
        if self.random.random() < 0.5:
            plan = self.execute(plan)
            self.complete(plan)
            self.append_oldest(plan)
            return
        self.scheduler.discard(plan)
        for row in plan.rows:
            if row.seq_id in self.requests:
                self.requests[row.seq_id].num_computed = row.start
        self.drop_requeued()

    def reset(self) -> None:
        """The weights change: values computed with the old ones are never hit again."""
        self.scheduler.reset_prefix_cache()
        for request in self.requests.values():
            num_hit = request.state.num_computed_tokens
            if request.num_computed < num_hit:  # static batching: admitted, but not yet planned
                request.num_computed = num_hit
                request.versions = [self.executor.weight_version] * num_hit
        self.executor.weight_version += 1


FULL = AttentionView()
CONFIGS: dict[str, tuple[tuple[AttentionView, ...], dict[str, object]]] = {
    "full": ((FULL,), {}),
    "window": ((FULL, AttentionView(5), AttentionView(5)), {}),
    "window_of_one": ((AttentionView(1), FULL), {}),
    "chunks": ((AttentionView(4, chunked=True), FULL), {}),
    "only_windows": ((AttentionView(7), AttentionView(6, chunked=True)), {}),
    "no_attention": ((), {}),
    "static": ((FULL, AttentionView(5)), {"batching": "static"}),
    "no_prefix_cache": ((FULL, AttentionView(5)), {"prefix_caching": False}),
}
"""KV cache groups and other options of the configurations that the workload covers."""


def make_config(
    name: str, *, block_size: int, num_tokens: int = 90, **options: object
) -> SchedulerConfig:
    """Return a configuration whose pool stores about `num_tokens` tokens in all groups."""
    groups, extra = CONFIGS[name]
    num_blocks = max(len(groups), 1) * (-(-num_tokens // block_size) + 1)
    values: dict[str, object] = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "groups": groups,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 24,
        "min_prefill_chunk_tokens": 4,
        **extra,
        **options,
    }
    return SchedulerConfig(**values)  # type: ignore[arg-type]  # options of a table
