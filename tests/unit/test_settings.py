"""Options of a worker: what is refused, what is derived, what is shown."""

from pathlib import Path

import pytest

from engine.config import EngineConfig
from worker import settings
from worker import settings as module
from worker.errors import InvalidOption
from worker.settings import Settings, visible_gpus

ENGINE = EngineConfig(model="m")


@pytest.mark.parametrize("lease_s", [0.0, -1.0, 4000.0, float("nan")])
def test_a_lease_that_cannot_work_is_refused(lease_s: float) -> None:
    with pytest.raises(InvalidOption, match="--lease-s"):
        Settings(engine=ENGINE, lease_s=lease_s)


def test_a_port_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"--metrics-port: 70000 .* use 9400"):
        Settings(engine=ENGINE, metrics_port=70000)


@pytest.mark.parametrize(("name", "weight"), [("", 1.0), ("a", 0.0), ("a", -1.0), ("a", float("nan")), ("a", 1e9)])
def test_a_tenant_s_weight_that_cannot_work_is_refused(name: str, weight: float) -> None:
    with pytest.raises(InvalidOption, match="--tenant-weight"):
        Settings(engine=ENGINE, tenant_weights={name: weight})


def test_a_queue_name_that_would_break_the_keys_is_refused() -> None:
    with pytest.raises(InvalidOption, match="queue"):
        Settings(engine=ENGINE, queue="a{b}")


def test_a_lease_may_miss_three_renewals() -> None:
    assert Settings(engine=ENGINE, lease_s=30).renew_s == 7.5


@pytest.mark.parametrize(("lease_s", "reclaim_s"), [(30, 10), (120, 10), (1.5, 0.5)])
def test_reclaims_come_every_ten_seconds_or_three_in_a_short_lease(lease_s: float, reclaim_s: float) -> None:
    assert Settings(engine=ENGINE, lease_s=lease_s).reclaim_s == reclaim_s


def test_the_model_goes_by_the_name_it_was_asked_for_unless_another_is_given() -> None:
    assert Settings(engine=ENGINE).model_name == "m"
    assert Settings(engine=ENGINE, served_name="chat").model_name == "chat"


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that stands for /dev, on a machine with two GPUs."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(module, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.parametrize(("chosen", "count"), [(None, 2), ("", 0), ("1", 1), ("-1", 0), ("GPU-a,GPU-b", 2)])
def test_gpus_are_counted_as_the_environment_restricts_them(
    devices: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, count: int
) -> None:
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus() == count


def test_a_machine_without_device_files_has_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEVICES", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert visible_gpus() == 0


def test_engines_on_a_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "usable_cores", lambda: 12)
    shared = Settings(engine=EngineConfig(model="m", tensor_parallel=3), devices=("cpu", "cpu"))
    assert [engine.num_threads for engine in shared.engines] == [2, 2]
    assert Settings(engine=EngineConfig(model="m")).engines[0].num_threads is None
