"""JAX may not look for an accelerator here: kernels are interpreted on the CPU."""

import os

from simulated_tpu import see  # noqa: F401  a fixture of all tests

os.environ.setdefault("JAX_PLATFORMS", "cpu")
