"""Slots and KV: do the slots work, and if not, why; is the memory of the KV cache well used?"""

from collections.abc import Iterable

from grafana_foundation_sdk.models import dashboard as models

from source.board import Row, board
from source.palette import (
    BLOCKS,
    BLUE,
    DIRECTIONS,
    GREEN,
    GREY,
    MODES,
    ORANGE,
    PARTS,
    PHASES,
    SKY,
    SLOTS,
    VERMILLION,
    WASTE,
    State,
)
from source.panels import (
    BYTES_PER_S,
    COUNT,
    DASHED,
    PER_MIN,
    PER_S,
    RATIO,
    SECONDS,
    TOKENS,
    TOKENS_PER_S,
    Query,
    by_state,
    heat,
    lines,
    stack,
    stats,
)
from source.promql import aggregate, buckets, in_range, per_minute, quantile, rate, ratio, selected, total

WASTED = ratio(in_range("wasted_tokens_total"), in_range("batch_tokens_sum"))
WORKED = f"({in_range('slot_steps_total', state='decode')} + {in_range('slot_steps_total', state='prefill')})"


def dashboard() -> models.Dashboard:
    """The dashboard."""
    about = "Where every slot of every step went, how full the KV cache is and with what, and what memory pressure costs."
    rows = [GLANCE, STEPS, TIME, MEMORY, PRESSURE, DETAILS]
    return board("slotmill-slots", "slotmill / Slots and KV", about, rows)


def _quantiles(states: Iterable[State], metric: str, label: str) -> list[Query]:
    """Of each state the median, solid, and the 99th percentile, dashed."""
    return [
        Query(
            quantile(share, metric, **{label: state.value}),
            f"{state.words.partition(':')[0]}, p{share * 100:.0f}",
            state.colour,
            dash,
        )
        for state in states
        for share, dash in ((0.5, ()), (0.99, DASHED))
    ]


GLANCE = Row(
    "Do the slots work, and if not, why?",
    [
        stats(
            "Slots held now",
            "Slots held by a request, over all slots. With jobs waiting it should be above 90 %; when it is not, the"
            " chart below says what the free slots wait for. Without a backlog it follows the load.",
            RATIO,
            ratio(total("slots_active"), total("slots")),
            limits=[(None, SKY)],
        ),
        stats(
            "Slot-steps that worked",
            "Of all slots of all steps in the range shown, those that read a prompt or made a token. It is what the"
            " hardware was paid for; the rest is in the chart below, by reason.",
            RATIO,
            ratio(WORKED, in_range("slot_steps_total")),
            limits=[(None, GREEN)],
            is_over_range=True,
        ),
        stats(
            "KV blocks used now",
            "Blocks that running requests hold, over all blocks. Near 100 % with few preemptions is the aim; near 100 %"
            " with many of them means fewer --max-slots or more --kv-memory.",
            RATIO,
            ratio(total("kv_blocks", state="used"), total("kv_blocks_capacity")),
            limits=[(None, SKY)],
        ),
        stats(
            "Filled of what is allocated",
            "Positions that hold a token, over all positions of blocks in use. Paging loses at most one block a request,"
            " so it stays above 90 %; lower, look for a --reservation other than paged, or very short jobs.",
            RATIO,
            ratio(total("kv_tokens_filled"), total("kv_tokens_allocated")),
            limits=[(None, GREEN)],
        ),
        stats(
            "Prompt tokens found in cache",
            "Of the tokens of starting requests, those whose KV was there already, in the range shown. Jobs with a common"
            " beginning should show it; put what they share first in the prompt.",
            RATIO,
            ratio(in_range("prefix_cache_hit_tokens_total"), in_range("prefix_cache_queried_tokens_total")),
            limits=[(None, SKY)],
            is_over_range=True,
        ),
        stats(
            "Computed in vain",
            "Of all tokens computed in the range shown, those that nobody got. Below 2 % is usual; more is explained, by"
            " reason, under memory pressure below.",
            RATIO,
            WASTED,
            limits=[(None, GREEN), (0.02, ORANGE), (0.1, VERMILLION)],
            is_over_range=True,
        ),
        stack(
            "Slot-steps by what the slot did",
            "Each step gives each slot one turn; this is where the turns went. Healthy with a backlog: green and blue"
            " fill the chart. Red waits for KV blocks (more --kv-memory, fewer --max-slots), orange for the token budget"
            " (raise --token-budget), grey for jobs. A gap is time without any step.",
            RATIO,
            by_state(SLOTS, lambda state: ratio(rate("slot_steps_total", state=state), rate("slot_steps_total"))),
            top=1,
            width=24,
            height=11,
        ),
    ],
)


STEPS = Row(
    "How full are the batches?",
    [
        lines(
            "Slots and requests",
            "Slots there are, slots held, and requests inside the engine. Waiting requests beside free slots want memory"
            " or budget; none waiting beside free slots means that the queue is empty or the worker does not fetch.",
            COUNT,
            [
                Query(total("slots"), "Slots there are", GREY, DASHED),
                Query(total("slots_active"), "Slots held", GREEN),
                Query(total("requests_running"), "Requests that run", BLUE),
                Query(total("requests_waiting"), "Requests that wait for a slot", VERMILLION),
            ],
        ),
        lines(
            "Tokens made",
            "Tokens sampled each second, and tokens computed with those of prompts. A flat line at full slots is what the"
            " hardware gives; when it falls at full slots, look at step durations.",
            TOKENS_PER_S,
            [
                Query(rate("generated_tokens_total"), "Sampled", GREEN),
                Query(rate("batch_tokens_sum"), "Computed, prompts included", BLUE),
            ],
        ),
        heat(
            "Requests in a step",
            "How many requests were computed together. A band at the number of slots is continuous batching at work; many"
            " small steps beside a backlog mean that slots wait, for the reason shown above.",
            COUNT,
            buckets("batch_size"),
        ),
        heat(
            "Tokens in a step",
            "Tokens computed in one step: one for each decoding request, many for prompts. A band at the token budget"
            " means that prompts are the load; raise --token-budget if latency allows.",
            TOKENS,
            buckets("batch_tokens"),
        ),
    ],
)


TIME = Row(
    "Where does the engine's time go?",
    [
        stack(
            "Engine time by part",
            "Share of wall-clock time that an engine spends in each part of a step; what is missing to 100 % passed"
            " between steps. Green should dominate under load; much time elsewhere means that the CPU holds the device up"
            " (try --run-ahead).",
            RATIO,
            by_state(PARTS, lambda part: ratio(rate("engine_time_seconds_total", part=part), total("engine_up"))),
            top=1,
        ),
        lines(
            "Step duration",
            "Time of one step, median and 99th percentile, by what the step held. A step is the pause between two tokens"
            " of every running job: where mixed steps are long, a lower --token-budget shortens them.",
            SECONDS,
            _quantiles(PHASES, "engine_step_duration_seconds", "phase"),
        ),
        stack(
            "Steps by what they held",
            "Steps each second. With chunked prefill, mixed steps replace prefill steps, and nobody's decode stands still"
            " for a long prompt. Zero while requests run is an engine that hangs.",
            PER_S,
            by_state(PHASES, lambda phase: rate("engine_steps_total", phase=phase)),
        ),
        lines(
            "Time without a step, while there is work",
            "For each engine; 0 where nothing is to be done. It should stay below the longest step; at --stall-s (60 s) the"
            " worker kills its engine and starts it again. See its log for engine_down.",
            SECONDS,
            [
                Query(
                    aggregate("max", selected("engine_stalled_seconds"), "instance", "engine"),
                    "{{instance}}, engine {{engine}}",
                )
            ],
        ),
    ],
)


MEMORY = Row(
    "Is the KV cache well used?",
    [
        stack(
            "KV blocks by state",
            "All blocks of the cache. Cached blocks are free for whoever needs them and speed up prompts that begin"
            " alike. Green at the top with preemptions is too little memory; much grey under load is too few slots.",
            COUNT,
            by_state(BLOCKS, lambda state: total("kv_blocks", state=state)),
            width=8,
        ),
        stack(
            "KV positions: filled and lost to fragmentation",
            "Token positions in blocks that requests hold. Orange is set aside and empty: with paging less than a block"
            " for each request. More of it means a --reservation that sets aside what a job may never use.",
            TOKENS,
            [
                Query(total("kv_tokens_filled"), "Filled with a token", GREEN),
                Query(
                    f"clamp_min({total('kv_tokens_allocated')} - {total('kv_tokens_filled')}, 0)",
                    "Allocated and empty",
                    ORANGE,
                ),
            ],
            width=8,
        ),
        lines(
            "Prefix cache",
            "Tokens of starting requests that were looked up and found, each second. The gap between the lines is what"
            " had to be computed; if prompts begin alike and nothing is found, blocks are reused too soon: give the cache"
            " more memory.",
            TOKENS_PER_S,
            [
                Query(rate("prefix_cache_queried_tokens_total"), "Looked up", GREY),
                Query(rate("prefix_cache_hit_tokens_total"), "Found", SKY),
            ],
            width=8,
        ),
    ],
)


PRESSURE = Row(
    "What does memory pressure cost?",
    [
        lines(
            "Preemptions",
            "Running requests that gave up their blocks so that others could go on, each minute. A few at full memory are"
            " the price of not reserving; one a second or more wants fewer --max-slots or more KV memory.",
            PER_MIN,
            by_state(MODES, lambda mode: per_minute("preemptions_total", mode=mode)),
            width=8,
        ),
        lines(
            "Positions given up",
            "Computed positions that preemption took, each second: swapped ones come back by a copy, the others are"
            " computed again. Where recomputing dominates, --swap-blocks gives swapping room.",
            TOKENS_PER_S,
            by_state(MODES, lambda mode: rate("preempted_tokens_total", mode=mode)),
            width=8,
        ),
        stack(
            "Tokens computed in vain, by reason",
            "Each second. Preempted: too little memory. Fenced: jobs taken over while a worker still computed them"
            " (leases too short, or a host that stood still). Aborted: jobs given back in a drain or a crash. Run ahead:"
            " one token a finished request.",
            TOKENS_PER_S,
            by_state(WASTE, lambda reason: rate("wasted_tokens_total", reason=reason)),
            width=8,
        ),
        lines(
            "Swap traffic",
            "Bytes of KV blocks copied between device and host. Out without in means that swapped requests do not come"
            " back: the pool of the device is too small for the requests in it.",
            BYTES_PER_S,
            by_state(DIRECTIONS, lambda direction: rate("swap_bytes_total", direction=direction)),
        ),
        lines(
            "Swap duration",
            "Time of one step's copies, median and 99th percentile. It is part of the step, so every running job waits"
            " for it; above a tenth of a step, compare --preemption recompute.",
            SECONDS,
            _quantiles(DIRECTIONS, "swap_duration_seconds", "direction"),
        ),
    ],
)


DETAILS = Row(
    "Details: each worker and engine",
    [
        lines(
            "KV blocks used, by worker",
            "Used blocks over all blocks of each worker. Workers of one queue should lie close together; one apart from"
            " the others has other options or very different jobs.",
            RATIO,
            [Query(aggregate("max", selected("kv_usage_ratio"), "instance"), "{{instance}}")],
            top=1,
            width=8,
        ),
        lines(
            "Slots held, by engine",
            "Slots held in each engine. A job goes to the engine with the most free slots, so they rise and fall"
            " together; one at 0 beside busy ones is down or starting.",
            COUNT,
            [Query(total("engine_slots_active", "instance", "engine"), "{{instance}}, engine {{engine}}")],
            width=8,
        ),
        lines(
            "Blocks copied and blocks lost",
            "Copies are made when choices of one prompt begin to differ, and are normal with n above 1. Lost blocks are a"
            " fault of ours, taken back when the engine is idle: any of them is worth a bug report.",
            PER_MIN,
            [
                Query(per_minute("copied_blocks_total"), "Copied on write", SKY),
                Query(per_minute("leaked_blocks_total"), "Lost and taken back", VERMILLION),
            ],
            width=8,
        ),
    ],
    is_closed=True,
)
