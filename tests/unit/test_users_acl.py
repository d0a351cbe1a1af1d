"""The user that workers and clients need no more than."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ACL = (ROOT / "ops/redis/users.acl").read_text()
LINE = next(line for line in ACL.splitlines() if line.startswith("user slotmill "))
ALLOWED = {word[1:] for word in LINE.split() if word.startswith("+")}
SCRIPTS = sorted((ROOT / "worker/scripts").glob("*.lua"))


def test_every_command_of_the_scripts_is_allowed() -> None:
    called = re.compile(r"redis\.p?call\('(\w+)'(?:, '([A-Z]+)')?")
    used = {(command.lower(), first.lower()) for path in SCRIPTS for command, first in called.findall(path.read_text())}
    assert [pair for pair in sorted(used) if pair[0] not in ALLOWED and "|".join(pair) not in ALLOWED] == []


def test_nothing_is_allowed_beyond_the_keys_and_channels_of_queues() -> None:
    assert {word for word in LINE.split() if word[0] in "~&%"} == {"~slotmill:*", "&slotmill:*"}
    assert not [word for word in LINE.split() if word.startswith("+@")]


def test_the_manual_shows_the_same_line() -> None:
    assert LINE in " ".join((ROOT / "docs/operations.md").read_text().split())
