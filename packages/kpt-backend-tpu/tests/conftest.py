"""JAX may not look for an accelerator here: kernels are interpreted on the CPU."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
