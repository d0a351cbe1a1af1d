"""Directories that are made once, from a model, and kept in the user's cache.

Relies on renames being atomic. Leaves to its callers what goes into a directory, and a name that changes with its content.

What holds:
1. A directory under its final name was whole when it got that name; sizes of its files are in its manifest.
2. One that no longer agrees with its manifest is made again, never used.
3. Processes that want the same directory wait for the one that makes it.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import platformdirs
from filelock import FileLock

from engine.errors import ConfigError, one_line

_MANIFEST = ".slotmill.json"


def cache_dir() -> Path:
    """`SLOTMILL_CACHE_DIR`, else the user's cache directory of slotmill; models are under `models`."""
    return Path(os.environ.get("SLOTMILL_CACHE_DIR") or platformdirs.user_cache_dir("slotmill")).expanduser() / "models"


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The directory `name` of the cache; `make` fills it where it is not there, or no longer whole.

    Raises `ConfigError` when the cache cannot be written, and whatever `make` raises.
    """
    target = cache_dir() / name
    if _is_whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not _is_whole(target):
                _make(target, make)
    except OSError as error:
        raise ConfigError(f"model cache: {target}: {one_line(error)}; free space, or set SLOTMILL_CACHE_DIR") from error
    return target


def _make(target: Path, make: Callable[[Path], None]) -> None:
    """Fill a directory of another name and rename it. The caller holds the lock, so what lies around is a dead process's."""
    partial = target.with_name(f"{target.name}.partial")
    for leftover in (partial, target):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    try:
        make(partial)
        _seal(partial)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _seal(directory: Path) -> None:
    """Write the manifest, and see everything on disk: a rename may outlive a power cut that the content does not."""
    sizes = {path.relative_to(directory).as_posix(): path.stat().st_size for path in directory.rglob("*") if path.is_file()}
    (directory / _MANIFEST).write_text(json.dumps(sizes, indent=1))
    for path in (*map(directory.joinpath, sizes), directory / _MANIFEST):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _is_whole(directory: Path) -> bool:
    try:
        sizes = json.loads((directory / _MANIFEST).read_text())
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False
