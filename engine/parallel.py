"""A model that several processes compute together, as one runner: this process leads, its children do as it does.

`TensorParallelRunner` is rank 0; `python -m engine.parallel --fd N` is each of the others, a `ModelRunner` that repeats every
call of rank 0 on its own shard of the model. Relies on shard.py for how the model is cut and on ranks.py for the processes.

Calls go to the children before rank 0 makes the same call itself, and all meet in the sums of the layers. Whoever dies leaves
the others waiting there: ranks.py hears of it on a thread, and the engine ends.
"""

import argparse
import contextlib
import os
import pickle
from dataclasses import fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from engine import model
from engine.batch import ModelInput
from engine.config import EngineConfig
from engine.errors import EngineError, one_line
from engine.model_runner import ModelRunner
from engine.ranks import LEAVE_S, Ranks
from engine.serve import inherited
from engine.shard import Shard
from engine.staging import Reading, Staging, staging_for


class TensorParallelRunner(ModelRunner):
    """A `ModelRunner` of `config.tensor_parallel` processes, of which this is the first."""

    def __init__(self, config: EngineConfig, ranks: Ranks) -> None:
        """Load and size as the others do; errors as those of `ModelRunner`."""
        self._ranks = ranks
        shard = Shard(0, config.tensor_parallel, self._ranks.least)
        try:
            model.check(model.resolve(config.model), shard)  # before the children load: one voice is enough to refuse
            self._ranks.tell((config, self._ranks.store))
            with self._ranks.watched():
                _join(shard, config, self._ranks.store)
                super().__init__(config, shard)
        except BaseException:
            self.close(0)
            raise

    def forward(self, model_input: ModelInput) -> Tensor:
        """See `ModelRunner.forward`."""
        with self._ranks.watched():
            self._ranks.tell(("forward", (_packed(model_input),)))
            return super().forward(model_input)

    def move(self, *moves: Any) -> None:
        """Move KV blocks on every rank, as `ModelRunner.move`."""
        with self._ranks.watched():
            self._ranks.tell(("move", moves))
            super().move(*moves)

    def close(self, leave_s: float = LEAVE_S) -> None:
        """Make the children leave and wait for them, `leave_s` seconds at most."""
        self._ranks.close(leave_s)
        if dist.is_initialized():
            dist.destroy_process_group()


def _join(shard: Shard, config: EngineConfig, store: Path) -> None:
    device = torch.device(shard.place(config.device))
    if device.type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers would choose a GPU that is there
    shard.join(store, device)


def _packed(model_input: ModelInput) -> dict[str, Any]:
    """The input as plain arrays."""
    values = {field.name: getattr(model_input, field.name) for field in fields(model_input)}
    return {name: Reading(value).wait() if isinstance(value, Tensor) else value for name, value in values.items()}


def _unpacked(values: dict[str, Any], staging: Staging) -> ModelInput:
    tensors: dict[str, Any] = {
        name: staging.add(value.copy()) if isinstance(value, np.ndarray) else value for name, value in values.items()
    }
    staging.send()
    return ModelInput(**tensors)


def _follow(conn: Connection, rank: int, size: int) -> None:
    """Load a shard and repeat the calls of rank 0 until it says no more."""

    def told() -> Any:
        return pickle.loads(conn.recv_bytes())

    def agree(number: int) -> int:
        conn.send(number)
        least: int = told()
        return least

    start: tuple[EngineConfig, Path] | None = told()
    if start is None:
        return
    config, store = start
    shard = Shard(rank, size, agree)
    _join(shard, config, store)
    runner = ModelRunner(config, shard)
    staging = staging_for(runner.device)
    while call := told():
        method, arguments = call
        if method == "forward":
            runner.forward(_unpacked(arguments[0], staging))
        else:
            getattr(runner, method)(*arguments)
            runner.swap_times()  # rank 0's are told; these are only let go


def main() -> int:
    """A child. Exit code 1 when it cannot go on; rank 0 has been told why."""
    parser = argparse.ArgumentParser(description="one of the processes of a tensor-parallel engine; started by rank 0")
    for option in ("--fd", "--rank", "--size"):
        parser.add_argument(option, type=int, required=True)
    options = parser.parse_args()
    conn = inherited(options.fd)
    try:
        _follow(conn, options.rank, options.size)
    except (EOFError, ConnectionError):
        return 0  # rank 0 is gone
    except Exception as error:  # noqa: BLE001  of every kind: rank 0 tells of it
        reason = str(error) if isinstance(error, EngineError) else one_line(error)
        with contextlib.suppress(OSError):
            conn.send(reason)
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main())  # there is nothing to put away, and torch would take a second or two for it
