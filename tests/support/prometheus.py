"""A real Prometheus that scrapes what it is told, each second, and answers queries.

Its job is that of ops/prometheus/prometheus.yml with other targets, so that labels are what dashboards and alerts will see. The
binary is the one that `make test` puts beside Python.
"""

import json
import math
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import yaml

from tests.support.wait import wait_until
from worker.embedded import die_with_parent, free_port

SCRAPE_S = 1
START_S = 30.0
OPS = Path(__file__).parents[2] / "ops"
BINARY = Path(sys.executable).with_name("prometheus")


class Series(NamedTuple):
    """One line of an answer."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]
    """Unix time and value."""

    @property
    def finite(self) -> list[float]:
        return [value for _, value in self.points if math.isfinite(value)]


class Prometheus:
    """A context manager; data live and end with it."""

    def __init__(self, targets: Sequence[str]) -> None:
        assert BINARY.exists(), f"{BINARY}: missing; `make test` fetches it"
        self.url = f"http://127.0.0.1:{free_port()}"
        self._targets = list(targets)

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(self._command(Path(self._folder.name)), stderr=subprocess.DEVNULL)
        try:
            wait_until(self._is_ready, START_S, "a Prometheus that answers")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait(10)
        self._folder.cleanup()

    def at(self, expr: str, time: float) -> list[Series]:
        """The answer at one time. AssertionError, with what Prometheus says, for an expression that it refuses."""
        found = self._get("query", query=expr, time=time)
        if found["resultType"] == "scalar":
            return [Series({}, [_point(found["result"])])]
        return [Series(series["metric"], [_point(series["value"])]) for series in found["result"]]

    def over(self, expr: str, start: float, end: float) -> list[Series]:
        """The answer over a time range."""
        found = self._get("query_range", query=expr, start=start, end=end, step=SCRAPE_S)
        return [Series(series["metric"], list(map(_point, series["values"]))) for series in found["result"]]

    def label_values(self, label: str, selector: str, start: float, end: float) -> list[str]:
        """All values of a label on the series that had samples then."""
        found: list[str] = self._get(f"label/{label}/values", **{"match[]": selector, "start": start, "end": end})
        return found

    def _get(self, path: str, **parameters: object) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{parameters}: {json.load(error)['error']}") from None

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, "Prometheus left"
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def _command(self, folder: Path) -> list[str]:
        config = yaml.safe_load((OPS / "prometheus" / "prometheus.yml").read_text())
        [job] = config["scrape_configs"]
        scraped = {"job_name": job["job_name"], "static_configs": [{"targets": self._targets}]}
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump({"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": [scraped]}))
        listen = self.url.removeprefix("http://")
        options = {
            "config.file": file,
            "storage.tsdb.path": folder / "data",
            "web.listen-address": listen,
            "log.level": "error",
        }
        return [*die_with_parent(), str(BINARY), *(f"--{name}={value}" for name, value in options.items())]


def _point(pair: Sequence[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])
