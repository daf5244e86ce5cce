"""`python -m kpt_cli` is the command `kpt`."""

from .main import main

main()
