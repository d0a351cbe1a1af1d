"""What the log never says unless asked."""

import json
from collections.abc import Iterator

import pytest

from worker import log

SECRET = "the prompt that nobody may read"


@pytest.fixture(autouse=True)
def _back_to_normal() -> Iterator[None]:
    yield
    log.configure()


def failing_line(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    try:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise ValueError(f"cannot encode {SECRET}") from error
    except ValueError:
        log.get("test").error("turn_failed", exc_info=True)
    return json.loads(capsys.readouterr().err)


def test_a_traceback_says_where_and_what_kind_but_not_about_what(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(verbose=True)
    line = failing_line(capsys)
    assert SECRET not in line["exception"].replace('f"cannot encode {SECRET}"', "")
    assert [name in line["exception"] for name in ("KeyError", "ValueError", "test_log.py")] == [True] * 3


def test_a_traceback_is_whole_when_prompts_may_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(prompts=True)
    assert failing_line(capsys)["exception"].count(SECRET) == 2


@pytest.mark.parametrize(("prompts", "shown"), [(False, {}), (True, {"prompt": SECRET})])
def test_private_fields_are_there_when_asked_for_only(prompts: bool, shown: dict[str, str]) -> None:
    log.configure(prompts=prompts)
    assert log.private(prompt=SECRET) == shown
