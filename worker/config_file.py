"""Options from a TOML file, and what a command was told, written as such a file.

    command line > environment > file > default

Keys are options without their dashes. Those of one command stand in its section (`[start]`, `[queue-stats]`), those of `SHARED`
also above all sections, for every command. Relies on click's `default_map` for the precedence, and on each option's own type.
The whole file is checked whichever command reads it. Leaves what options mean to their commands.
"""

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from worker.codec import has_lone_surrogate
from worker.connection import hide_password

SHARED = ("redis-url", "queue", "partitions")
"""Keys that may stand above the sections."""


_FILE = "slotmill.config"


class _Refused(Exception):
    """One line, without the name of the file."""


def use(ctx: click.Context, _option: click.Parameter, path: Path | None) -> None:
    """Callback of `--config`, before other options are looked at: what the file says are their defaults."""
    if path is None or ctx.resilient_parsing:
        return
    commands = dict(_commands(ctx.find_root().command))
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        shared = _values({key: value for key, value in given.items() if key not in commands}, commands, "")
        own = {name: _values(given.get(name, {}), {name: command}, name) for name, command in commands.items()}
    except OSError as error:
        raise click.UsageError(f"--config: {path}: {error.strerror}; name a TOML file", ctx) from None
    except RecursionError:
        raise click.UsageError(f"{path}: nested too deeply; no option takes more than a list", ctx) from None
    except ValueError as error:
        raise click.UsageError(f'{path}: {error}; write TOML, as in queue = "jobs"', ctx) from None
    except _Refused as refused:
        raise click.UsageError(f"{path}: {refused}", ctx) from None
    ctx.meta[_FILE] = path
    ctx.default_map = shared | own.get(section_of(ctx), {})


def section_of(ctx: click.Context) -> str:
    """The section of the running command."""
    return "-".join(ctx.command_path.split()[1:])


def written(ctx: click.Context) -> Iterator[str]:
    """Lines of a file that says what the running command was told, each value with where it comes from."""
    known = _in_files(ctx.command)
    yield from (_line(ctx, key, known[key]) for key in SHARED if key in known)
    yield f"\n[{section_of(ctx)}]"
    yield from (_line(ctx, key, option) for key, option in known.items() if key not in SHARED and not option.hidden)


def _line(ctx: click.Context, key: str, option: click.Option) -> str:
    """What has no value, or may not be shown, stands in a comment."""
    value, source = ctx.params[option.name or ""], _source(ctx, option)
    if value is None:
        return f"# {key} is not set"
    if has_lone_surrogate(_toml(value)):
        return f"# {key} is not text that a file can hold, {source}; give {option.envvar}"
    if isinstance(value, str) and hide_password(value) != value:
        return f"# {key} = {_toml(hide_password(value))}  # {source}; without its password, so give {option.envvar}"
    return f"{key} = {_toml(value)}  # {source}"


def _source(ctx: click.Context, option: click.Option) -> str:
    path = str(ctx.meta.get(_FILE))
    return {
        ParameterSource.COMMANDLINE: f"from {option.opts[-1]}",
        ParameterSource.ENVIRONMENT: f"from {option.envvar}",
        ParameterSource.DEFAULT_MAP: f"from {path if path.isprintable() else json.dumps(path)}",
    }.get(ctx.get_parameter_source(option.name or "") or ParameterSource.DEFAULT, "default")


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _commands(command: click.Command, *path: str) -> Iterator[tuple[str, click.Command]]:
    """Every command by the name of its section."""
    if not isinstance(command, click.Group):
        yield "-".join(path), command
        return
    for name, item in command.commands.items():
        yield from _commands(item, *path, name)


def _in_files(command: click.Command) -> dict[str, click.Option]:
    """A command's options that are of more than one call: those that are variables of the environment too."""
    options = [param for param in command.params if isinstance(param, click.Option) and param.expose_value]
    return {option.opts[-1].removeprefix("--"): option for option in options if str(option.envvar).startswith("SLOTMILL_")}


def _values(table: object, commands: Mapping[str, click.Command], section: str) -> dict[str, Any]:
    """The default of each parameter that `table` gives; `section` is empty for what stands above the sections."""
    if not isinstance(table, Mapping):
        raise _Refused(f"{section} is a section; write [{section}]")
    known = {
        key: option for command in commands.values() for key, option in _in_files(command).items() if section or key in SHARED
    }
    found = {}
    for key, value in table.items():
        where = f"[{section}] {key}" if section else key
        if option := known.get(key):
            found[option.name or ""] = _checked(option, value, where)
        elif isinstance(value, Mapping):
            advice = _nearest(key, commands) or "one is a command, with a dash between its words"
            raise _Refused(f"[{where}]: no such section; {advice}")
        else:
            _refuse_unknown(key, where, known)
    return found


def _refuse_unknown(key: str, where: str, known: Iterable[str]) -> NoReturn:
    advice = _nearest(key, known) or f"known here: {', '.join(known) or 'none'}"
    raise _Refused(f"{where}: no such option; {advice}")


def _nearest(key: str, known: Iterable[str]) -> str:
    return "".join(f"did you mean {name}?" for name in difflib.get_close_matches(key, known, 1))


def _checked(option: click.Option, value: object, where: str) -> object:
    """`value` as it stands when the option takes it; a number in quotes is none, and true is no 1."""
    items = value if option.multiple else [value]
    if not isinstance(items, list):
        raise _Refused(f"{where}: {_toml_start(value)} is not a list; write [...]")
    for item in items:
        kinds, words = _kinds(option)
        if not isinstance(item, kinds) or isinstance(item, bool) != (kinds is bool):
            raise _Refused(f"{where}: {_toml_start(item)} is not {words}")
        try:
            option.type.convert(item, None, None)
        except click.BadParameter as error:
            raise _Refused(f"{where}: {error.message}") from None
        except OverflowError:
            raise _Refused(f"{where}: {_toml_start(item)} is too large for {words}") from None
    return value


def _toml_start(value: object) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)[:64]


def _kinds(option: click.Option) -> tuple[type | tuple[type, ...], str]:
    """The TOML types that an option takes, and their name for people."""
    if option.is_flag:
        return bool, "true or false"
    if isinstance(option.type, click.types.IntParamType):
        return int, "a whole number"
    if option.type.name == "memory":
        return (int, float, str), "a number or text"
    if isinstance(option.type, click.types.FloatParamType):
        return (int, float), "a number"
    return str, "text; write it in quotes"
