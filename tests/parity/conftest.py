"""One tiny Llama for all files here: its directory, a runner on it, and transformers' own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.model_runner import ModelRunner
from tests.support import parity
from tests.support.tiny import save_tiny_llama


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny(tiny_dir: Path) -> ModelRunner:
    """To be run through `parity.run` and `parity.Configured`."""
    return parity.load(tiny_dir)


@pytest.fixture(scope="session")
def tiny_model(tiny_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
