"""What every record says of where it was made."""

import platform
import subprocess
import sys
from pathlib import Path


def machine() -> dict[str, str]:
    """Processor, Python, commit and command of this run."""
    return {
        "processor": processor(),
        "python": platform.python_version(),
        "commit": commit(),
        "command": f"python -m {Path(sys.argv[0]).parent.name}.{Path(sys.argv[0]).stem} {' '.join(sys.argv[1:])}".strip(),
    }


def processor() -> str:
    """The processor's name, or the architecture's where it has none."""
    with Path("/proc/cpuinfo").open() as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """The commit that is checked out, marked where files differ from it."""
    answer = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"
