"""What all commands share: options that are environment variables too, errors in one line, exit codes.

    0 all well   1 some jobs failed   2 bad input   3 cancelled   4 timeout   5 no server   6 no engine

and 141, without a word, when nobody reads the output any more: that of a process ended by SIGPIPE. Relies on click.
`--verbose` adds the traceback to any error.
"""

import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import redis
from click.core import ParameterSource

from engine.errors import ConfigError, EngineError, RequestRefused
from worker import config_file, progress
from worker.connection import DEFAULT_REDIS_URL, hide_password
from worker.errors import (
    EngineUnavailable,
    InvalidJob,
    InvalidOption,
    ServerUnavailable,
    SlotmillError,
    UnknownJob,
    WaitTimeout,
)
from worker.keys import DEFAULT_QUEUE

OK, FAILED, BAD_INPUT, CANCELLED, TIMEOUT, NO_SERVER, NO_ENGINE = range(7)
"""Exit codes."""
NOBODY_READS = 141

_VERBOSE = "slotmill.verbose"

F = TypeVar("F", bound=Callable[..., Any])

_CODES: tuple[tuple[tuple[type[BaseException], ...], int], ...] = (
    ((InvalidJob, InvalidOption, UnknownJob, ConfigError, RequestRefused, UnicodeError), BAD_INPUT),
    ((KeyboardInterrupt, click.Abort), CANCELLED),
    ((WaitTimeout,), TIMEOUT),
    ((ServerUnavailable, redis.RedisError), NO_SERVER),
    ((EngineUnavailable, EngineError), NO_ENGINE),
    ((SlotmillError, OSError), FAILED),
)
_OF_THE_LINE = (InvalidJob, InvalidOption, ConfigError, RequestRefused)
"""Errors in what was typed; the others are of the world around it."""


class Command(click.Command):
    """A command that ends in a line (or one for each bad option) and an exit code, and knows `--config` and `--verbose`."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        """`examples`: lines to type, which end the help; each is parsed in a test."""
        super().__init__(*args, **kwargs)
        self.examples = examples
        verbose = click.Option(
            ["--verbose"], is_flag=True, expose_value=False, callback=_note_verbose, help="Add the traceback to an error."
        )
        config = click.Option(
            ["--config"],
            type=click.Path(dir_okay=False, path_type=Path),
            envvar="SLOTMILL_CONFIG",
            show_envvar=True,
            metavar="FILE",
            is_eager=True,
            expose_value=False,
            callback=config_file.use,
            help="TOML file of options; command line and environment come before it.",
        )
        self.params += [config, verbose]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options, under their headings where they have some."""
        under: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (row := parameter.get_help_record(ctx)) is not None:
                under.setdefault(getattr(parameter, "heading", None) or "Options", []).append(row)
        for heading in sorted(under, key=lambda heading: heading == "Options"):
            with formatter.section(heading):
                formatter.write_dl(under[heading])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The end of the help."""
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {example}\n" for example in self.examples))
        super().format_epilog(ctx, formatter)

    def invoke(self, ctx: click.Context) -> Any:
        """Run it. Errors that are known become their exit code, the others stay bugs with a traceback."""
        try:
            return super().invoke(ctx)
        except tuple(kind for kinds, _ in _CODES for kind in kinds) as error:
            if is_verbose():
                click.echo(traceback.format_exc(), err=True, nl=False)
            *others, last = _said(error)
            for problem in others:
                note(problem)
            fail(last, next(code for kinds, code in _CODES if isinstance(error, kinds)))


class Group(click.Group):
    """Commands in the order in which they were added, which is the order of use."""

    command_class = Command
    group_class = type

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names as `--help` lists them."""
        del ctx
        return list(self.commands)


def _said(error: BaseException) -> list[str]:
    """In a line; of options in one for each that cannot work."""
    if isinstance(error, OSError) and error.strerror:  # without the number
        return [": ".join(str(part) for part in (error.filename, error.strerror) if part is not None)]
    said = str(error) or "cancelled"
    if not isinstance(error, _OF_THE_LINE):
        return [said]
    return [_with_command(line, click.get_current_context()) for line in said.splitlines()]


def _with_command(message: str, context: click.Context | None) -> str:
    """What is wrong with a command line, after the command that refuses it."""
    path = context.command_path.split()[1:] if context else ()
    return ": ".join(filter(None, (" ".join(path), message)))


def say(text: str = "", *, nl: bool = True) -> None:
    """Print on stdout. Leaves quietly when nobody reads any more, with one line when it cannot be written."""
    try:
        with progress.aside():
            click.echo(text, nl=nl)
    except OSError as error:
        raise click.exceptions.Exit(_give_up_output(error)) from None


def _give_up_output(error: OSError) -> int:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())  # what is still buffered would fail again at exit
    os.close(nowhere)
    if isinstance(error, BrokenPipeError):
        return NOBODY_READS
    note(f"output: {error.strerror}; write it elsewhere")
    return FAILED


def plain(text: str) -> str:
    """`text` with a mark for each character that is not printable, so that what others wrote cannot steer a terminal."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def note(message: str) -> None:
    """Say one line on stderr."""
    with progress.aside():
        click.echo(f"worker: {' '.join(message.split())}", err=True)


def fail(message: str, code: int) -> NoReturn:
    """Say one line on stderr and leave with `code`."""
    note(message)
    raise click.exceptions.Exit(code)


def is_verbose() -> bool:
    """Whether the running command was given `--verbose`."""
    return bool(click.get_current_context().meta.get(_VERBOSE))


def _note_verbose(ctx: click.Context, _option: click.Parameter, value: bool) -> None:
    ctx.meta[_VERBOSE] = value


def option(*names: str, **attributes: Any) -> Callable[[F], F]:
    """A click option that is `SLOTMILL_<OPTION>` in the environment as well, and shows both that and its default."""
    long = next(name for name in names if name.startswith("--")).split("/")[0]
    envvar = "SLOTMILL_" + long.removeprefix("--").replace("-", "_").upper()
    return click.option(*names, envvar=envvar, show_envvar=True, show_default=True, **attributes)


def under(heading: str, *options: Callable[[F], F]) -> Callable[[F], F]:
    """These options stand under a heading of the command's help, in their order."""

    def add(function: F) -> F:
        before = list(getattr(function, "__click_params__", ()))
        for each in reversed(options):
            function = each(function)
        for added in getattr(function, "__click_params__", ())[len(before) :]:
            added.heading = heading
        return function

    return add


class _Seconds(click.types.FloatParamType):
    """Seconds from now that a clock can count: a century at most, and no NaN."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if not abs(seconds) <= SECONDS_LIMIT:
            self.fail(f"{value} is not a number of seconds up to {SECONDS_LIMIT}.", param, ctx)
        return seconds


class _Memory(click.types.FloatParamType):
    """A fraction up to 1, or bytes: as a number, a percentage or a size. More than 100 % would read as bytes, a byte as all."""

    name = "memory"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if parts := re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?(%|[KMGT]i?B)", str(value), re.IGNORECASE):
            number, unit = float(parts[1]), parts[2].upper()
            if unit == "%" and number <= 100:
                return number / 100
            if unit != "%" and (size := number * (1024 if "I" in unit else 1000) ** ("KMGT".index(unit[0]) + 1)) > 1:
                return float(int(size))
        try:
            return float(value)
        except ValueError:
            self.fail(f"{value!r} is no memory; write 0.6 or 60% of what is free, 4GiB, 512MB or a number of bytes", param, ctx)


SECONDS_LIMIT = 3_000_000_000
SECONDS = _Seconds()
MEMORY = _Memory()


def queue_options(function: F) -> F:
    """Which server and which queue."""
    function = option("--queue", default=DEFAULT_QUEUE, help="Name of the queue.")(function)
    return option(
        "--redis-url",
        default=DEFAULT_REDIS_URL,
        metavar="URL",
        help="URL of the server: redis, rediss, unix, redis+sentinel, redis+cluster.",
    )(function)


def partition_options(function: F) -> F:
    """Which server, and which queue in how many partitions."""
    help_text = "Queues that the queue is split into, as the workers were told."
    return queue_options(option("--partitions", type=int, default=1, help=help_text)(function))


def command_line(*words: str, partition: str | None = None) -> str:
    """`words` for the server and queue of the running command, as a line that works as it stands and holds no password.

    With a `partition` for that alone, as commands want it that know of no partitions.
    """
    context = click.get_current_context()
    line = list(words)
    if partition is not None and partition != context.params["queue"]:
        line += ["--queue", partition]
    elif context.get_parameter_source("queue") is not ParameterSource.DEFAULT:
        line += ["--queue", context.params["queue"]]
    if partition is None and context.params.get("partitions", 1) != 1:
        line += ["--partitions", str(context.params["partitions"])]
    option, where = server_words()
    return f"`{shlex.join(line + option)}`{where}"


def server_words() -> tuple[list[str], str]:
    """The option that names the running command's server, or, as a URL with a password is not shown, what to say beside it."""
    context = click.get_current_context()
    if context.get_parameter_source("redis_url") is ParameterSource.DEFAULT:
        return [], ""
    url = context.params["redis_url"]
    if hide_password(url) != url:
        return [], " and the server's URL in SLOTMILL_REDIS_URL"
    return ["--redis-url", url], ""


def run(group: click.Group, args: Sequence[str] | None = None) -> int:
    """Parse and run; the exit code. What click itself refuses is one line too."""
    try:
        code = group.main(args=args, prog_name="worker", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return BAD_INPUT
    except click.ClickException as error:
        note(_with_command(error.format_message(), error.ctx if isinstance(error, click.UsageError) else None))
        return BAD_INPUT
    except OSError as error:  # commands end in an exit code, so this is click's help
        return _give_up_output(error)
    except SystemExit as error:  # click's: its help met a closed pipe, or a shell's completion is done
        return NOBODY_READS if error.code else OK
    except (click.Abort, KeyboardInterrupt):
        return CANCELLED
    return code if isinstance(code, int) else OK
