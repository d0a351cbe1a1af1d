"""The model with its memory: loads it, proves it, measures what it needs, sizes the KV cache, and runs steps.

Relies on model.py for loading, attention.py for the seam to transformers, kv_cache.py for how many blocks fit and batch.py for
the input. What is in a step is the scheduler's decision; choosing tokens from the logits is the sampler's.
"""

import ctypes
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor

from engine import attention, model
from engine.batch import ModelInput, flatten
from engine.config import EngineConfig, SchedulerConfig
from engine.errors import ConfigError, OutOfMemory
from engine.kv_cache import KVCache, Memory, kv_bytes_per_token
from engine.request import Request, SamplingParams
from engine.sampler import sample
from engine.scheduler import ScheduledSequence
from engine.sequence import Sequence
from kernels.dispatch import attention_kernels

# Least bytes of device memory -> (max_slots, token_budget), largest first.
_GPU_DEFAULTS = ((79_000_000_000, (1024, 16_384)), (39_000_000_000, (512, 8192)), (0, (256, 4096)))
_CPU_DEFAULTS = (64, 2048)
_WATERMARK = 0.01
_PROFILE_BLOCK_SIZE = 16


class ModelRunner:
    """Everything of one engine that touches tensors. Building one takes as long as loading the model."""

    def __init__(self, config: EngineConfig) -> None:
        """Load, prove and size.

        Raises:
            ConfigError: an option cannot work with this model or machine.
            ModelUnsupported: the model would answer wrongly; with the reason.
            OutOfMemory: weights, activations and cache do not fit; with the table and what would.
        """
        self.device = _device(config.device)
        if self.device.type == "cpu":
            torch.set_num_threads(config.num_threads or _usable_cores())
            _keep_freed_memory()
        self.dtype = _dtype(config.dtype, self.device)
        directory = model.resolve(config.model)
        self.tokenizer_dir = model.tokenizer_dir(directory)
        self._model = model.load(directory, self.device, self.dtype)
        self.geometry = model.geometry(self._model)
        self._kernels = attention_kernels(self.device)
        attention.probe(self._model, self.geometry, self._kernels)
        self.kv_bytes_per_token = kv_bytes_per_token(self.geometry, self.dtype)
        self._allocate(config)

    @torch.inference_mode()
    def forward(self, model_input: ModelInput) -> Tensor:
        """Logits `[R, vocab_size]` float32 of the rows that are sampled; R may be 0. Keys and values are stored on the way."""
        return attention.forward(self._model, model_input, self._kv_cache, self._kernels)

    def memory_table(self) -> str:
        """Lines for people: where the memory goes, and what the cache holds."""
        return self._memory.table(self.scheduler_config.num_blocks)

    def _allocate(self, config: EngineConfig) -> None:
        max_model_len = _max_model_len(config, self.geometry.max_model_len)
        max_slots, token_budget = _limits(config, self.device, max_model_len)
        self._memory = self._measure(config.block_size, max_slots, token_budget, max_model_len)
        num_blocks = self._memory.num_blocks(config, max_slots)
        self._kv_cache = KVCache(self.geometry, num_blocks, config.block_size, self.dtype, self.device)
        self.scheduler_config = SchedulerConfig(
            max_slots=max_slots,
            max_num_batched_tokens=token_budget,
            block_size=config.block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            watermark_blocks=int(num_blocks * _WATERMARK),
            chunked_prefill=config.chunked_prefill,
        )

    def _measure(self, block_size: int, max_slots: int, token_budget: int, max_model_len: int) -> Memory:
        on_cpu = self.device.type == "cpu"
        activation_bytes = (self._estimate if on_cpu else self._profile)(max_slots, token_budget)
        free, total = _cpu_memory() if on_cpu else torch.cuda.mem_get_info(self.device)
        return Memory(
            device=str(self.device),
            total_bytes=total,
            free_bytes=free,
            weights_bytes=sum(weight.nbytes for weight in self._model.parameters()),
            activation_bytes=activation_bytes,
            token_bytes=self.kv_bytes_per_token,
            block_size=block_size,
            max_model_len=max_model_len,
        )

    def _estimate(self, max_slots: int, token_budget: int) -> int:
        """Peak bytes of a step on a CPU: the widest layer over all tokens, and logits with what sampling makes of them."""
        config = self._model.config.get_text_config(decoder=True)
        hidden = int(config.hidden_size)
        inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
        return token_budget * (6 * hidden + 3 * inner) * self.dtype.itemsize + max_slots * self.geometry.vocab_size * 16

    def _profile(self, max_slots: int, token_budget: int) -> int:
        """Peak bytes of the largest step on a GPU, sampling included, measured."""
        cache = KVCache(self.geometry, 1, _PROFILE_BLOCK_SIZE, self.dtype, self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        try:
            with torch.inference_mode():
                batch = _largest_step(max_slots, token_budget, self.device)
                sample(attention.forward(self._model, batch, cache, self._kernels), batch.sampling)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"token_budget: a step of {token_budget} tokens and {max_slots} slots does not fit beside the weights; "
                f"lower token_budget or max_slots ({error})"
            ) from error
        peak = torch.cuda.max_memory_allocated(self.device) - before
        torch.cuda.empty_cache()
        return peak


def _largest_step(max_slots: int, token_budget: int, device: torch.device) -> ModelInput:
    """A step with every slot and token in use, all of it in block 1: only the sizes matter."""
    num_sequences = min(max_slots, token_budget)
    request = Request(request_id="", prompt_token_ids=(0,) * (token_budget // num_sequences), params=SamplingParams(top_p=0.9))
    sequences = [Sequence(request, row, frozenset()) for row in range(num_sequences)]
    for sequence in sequences:
        sequence.block_table = [1] * -(-sequence.num_tokens // _PROFILE_BLOCK_SIZE)
    items = [ScheduledSequence(sequence, sequence.num_tokens, True) for sequence in sequences]
    return flatten(items, _PROFILE_BLOCK_SIZE, device)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: {name} is unknown; use cpu or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device: {name} is not there: torch sees {torch.cuda.device_count()} GPUs; use cpu, or install torch for CUDA"
        )
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: {name} is not supported; use cpu or cuda:N")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """What to compute in; `auto` is bfloat16 where the processor has instructions for it; without, it is 6 times slower."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or _cpu_computes_bfloat16() else torch.float32
    if name not in dtypes:
        raise ConfigError(f"dtype: {name} is unknown; use auto, {', '.join(dtypes)}")
    return dtypes[name]


def _cpu_computes_bfloat16() -> bool:
    features: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # absent in older torch
    return any(features.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _max_model_len(config: EngineConfig, model_limit: int) -> int:
    if config.max_model_len is not None and config.max_model_len > model_limit:
        raise ConfigError(
            f"max_model_len: {config.max_model_len} is over the {model_limit} positions this model can be served with; lower it"
        )
    return config.max_model_len or model_limit


def _limits(config: EngineConfig, device: torch.device, max_model_len: int) -> tuple[int, int]:
    """Slots and token budget: as configured, or by the device's memory. A step has room for a token of each slot."""
    slots, budget = _CPU_DEFAULTS
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        slots, budget = next(limits for least, limits in _GPU_DEFAULTS if total >= least)
    slots = config.max_slots or slots
    if not config.chunked_prefill:
        budget = max(budget, max_model_len)
    return slots, config.token_budget or max(budget, slots)


def _cpu_memory() -> tuple[int, int]:
    """Free and total bytes: the machine's, or those of the container's limit where that is lower."""
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    with suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        free, total = min(free, max(limit - used, 0)), min(total, limit)
    return free, total


def _usable_cores() -> int:
    """Cores this process may run on; a container or taskset may leave it fewer than the machine has."""
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # not on every system
        return len(process.cpu_affinity() or ()) or torch.get_num_threads()
    return torch.get_num_threads()


def _keep_freed_memory() -> None:
    """Tell glibc to keep freed memory instead of giving it back to the system after each large tensor.

    A layer's intermediate results are some MiB each, and each page of them costs a fault when the system gives it out again:
    attention over 16 sequences of 200 tokens took 4.6 ms before and 1.1 ms after (EPYC, two cores, virtual machine).
    """
    with suppress(AttributeError, OSError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: smaller pieces come from the heap
        mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD: the heap does not shrink below it
