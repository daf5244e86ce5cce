"""A Python process beside that of the tests."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def run(script, *arguments, **variables):
    """Run it with more environment variables; returns the words that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
        env=os.environ | variables,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
