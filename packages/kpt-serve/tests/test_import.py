import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["kpt_serve", "kpt_serve.package"])
def test_a_package_is_checked_without_torch(module):
    program = f"import sys, {module}; sys.exit(' '.join(sorted({{'torch', 'safetensors'}} & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{module} imports {done.stderr}"
