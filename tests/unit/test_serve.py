"""What the engine process tells the queue side while it loads."""

import logging

import pytest

from engine import serve
from engine.messages import EngineLoading


class Sent(list[object]):
    def send(self, message: object) -> None:
        self.append(message)


@pytest.mark.parametrize("name", ["engine.model", "kernels.cpu.program"])
def test_what_takes_long_is_a_phase_of_loading(name: str) -> None:
    sent = Sent()

    with serve._telling(sent):  # type: ignore[arg-type]
        logging.getLogger(name).info("converting %s, once", "a.gguf")
        logging.getLogger(name).debug("a detail")
        logging.getLogger("transformers").info("advice")
    logging.getLogger(name).info("afterwards")

    assert sent == [EngineLoading("converting a.gguf, once")]
