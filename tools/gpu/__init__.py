"""What only a GPU can prove: smoke test, conformance, benchmark and tuning; `python tools/gpu --help`."""
