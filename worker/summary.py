"""What a worker says of itself once, when it can serve: model, sizes, memory, queue and endpoints.

Pure. Relies on `EngineReady` for what the engine has resolved. Leaves the writing to `process`.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version

from engine.messages import EngineReady
from engine.stats import MemoryRow, memory_line
from worker.connection import hide_password
from worker.settings import Settings


def facts(settings: Settings, ready: EngineReady, url: str) -> dict[str, str | int | float]:
    """Fields of a line; sizes are those of one engine. `url` is where the worker listens."""
    return {
        "version": version("slotmill"),
        "model": settings.model_name,
        "dtype": ready.dtype,
        "device": settings.device_names,
        "engines": len(settings.engines),
        "slots": ready.max_slots,
        "token_budget": ready.token_budget,
        "kv_blocks": ready.num_blocks,
        "kv_tokens": ready.num_blocks * ready.block_size,
        "max_model_len": ready.max_model_len,
        "queue": settings.queue,
        "redis": hide_password(settings.redis_url),
        "metrics": f"{url}/metrics",
        "livez": f"{url}/livez",
        "readyz": f"{url}/readyz",
    }


def text(facts: Mapping[str, str | int | float], memory: Sequence[MemoryRow]) -> str:
    """The same as lines for people, and where the memory goes."""
    each = f" on each of {facts['engines']} engines" if facts["engines"] != 1 else ""
    rows = {
        "version": "slotmill {version}",
        "model": "{model} in {dtype} on {device}",
        "batch": f"{{slots}} slots, {{token_budget}} tokens a step{each}",
        "KV cache": f"{{kv_blocks}} blocks, which hold {{kv_tokens}} tokens{each}; longest sequence {{max_model_len}}",
        "queue": "{queue} on {redis}",
        "listens": "{metrics} {livez} {readyz}",
    }
    lines = [f"{name:<9} {row.format_map(facts)}" for name, row in rows.items()]
    lines += [f"{'' if number else 'memory':<9} {memory_line(row)}" for number, row in enumerate(memory)]
    return "\n".join(f"  {line}" for line in lines)
