"""The group `worker batch`. Its commands stand with what they do; what they share is in `options`."""

import click

from worker.batch.queue_commands import COMMANDS
from worker.batch.run_command import run
from worker.batch.verify import verify
from worker.command import Group


@click.group(cls=Group)
def batch() -> None:
    """Files of requests, as OpenAI's batch API takes them."""


for command in (run, *COMMANDS, verify):
    batch.add_command(command)
