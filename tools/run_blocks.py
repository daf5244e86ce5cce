"""Run programs, each in a process where the libraries that the arguments name are loaded and nothing is defined.

To start Python and import torch and transformers takes four seconds, to fork a process that has them a few
milliseconds. A request is a line of JSON on standard input: the names of the program, of the folder to run it in and of
the file that gets its output, and a time limit in seconds. The answer is a line with its exit code.
"""

import faulthandler
import gc
import importlib
import json
import os
import runpy
import sys


def run(program: str, folder: str, output: str, seconds: float) -> None:
    """Run a program as `python program` would, in a folder, with its output in a file."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    out = os.open(output, os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(folder)
    sys.argv, sys.path[0] = [program], folder
    faulthandler.dump_traceback_later(seconds, exit=True)
    runpy.run_path(program, run_name="__main__")


def main(*libraries: str) -> None:
    """Answer requests until there are no more; a child returns from here to end as any program does."""
    for library in libraries:
        importlib.import_module(library)
    ours = [module for module in sys.modules if module.startswith("kpt_")]
    assert not ours, f"a program could forget to import {ours}"
    gc.freeze()  # or each child would go through all that is loaded, and so copy it: a second
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            run(*json.loads(line))
            return
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
