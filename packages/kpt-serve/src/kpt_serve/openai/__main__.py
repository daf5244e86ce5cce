"""`python -m kpt_serve.openai FOLDER` serves a model without the command `kpt`."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from kpt_serve.errors import PackageError, ServeError

from . import OpenAIOptions, serve


def main() -> int:
    """Serve the folder that the command line names; each option has the name of its field."""
    parser = argparse.ArgumentParser(prog="python -m kpt_serve.openai", description="Serve a model by OpenAI's API.")
    parser.add_argument("folder", type=Path)
    for each in fields(OpenAIOptions):
        kind = Path if each.name in ("tls_certificate", "tls_key", "key") else type(each.default)
        parser.add_argument(
            f"--{each.name.replace('_', '-')}", type=str if kind is type(None) else kind, default=each.default
        )
    told = vars(parser.parse_args())
    try:
        return serve(told.pop("folder"), OpenAIOptions(**told))
    except (PackageError, ServeError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
