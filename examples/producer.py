"""Puts one job in, prints its tokens as they come, and then how it ended. Needs the package `slotmill`, without torch.

python examples/producer.py "Why is the sky blue?"
"""

import json
import os
import sys

from worker.client import Client

URL = os.environ.get("SLOTMILL_REDIS_URL", "redis://127.0.0.1:6379")
QUEUE = os.environ.get("SLOTMILL_QUEUE", "default")


def main(prompt: str) -> None:
    with Client(URL, QUEUE) as client:
        stream = client.stream(client.enqueue(prompt, max_tokens=64, temperature=0), timeout_s=600)
        text = ""
        for delta in stream:
            text = text[: delta.offset] + delta.text  # of one choice; an attempt that starts over cuts back
            print("\n[anew]" + text if delta.is_restart else delta.text, end="", flush=True)
        result = stream.result
        assert result is not None
        print("\n" + json.dumps({"id": result.id, "state": result.state, "code": result.code, "text": text}))


if __name__ == "__main__":
    main(sys.argv[1])
