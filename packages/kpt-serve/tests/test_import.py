import subprocess
import sys

import pytest

OPTIONAL = ("torch", "safetensors", "cyclonedx", "huggingface_hub", "jinja2", "model_signing", "OpenSSL")
MODULES = [
    "kpt_serve",
    "kpt_serve.openai",
    "kpt_serve.oip.server",
    "kpt_serve.client",
    *(f"kpt_serve.package{name}" for name in ("", ".manifest", ".checking", ".reading")),
]


@pytest.mark.parametrize("module", MODULES)
def test_a_package_is_checked_without_torch(module):
    program = f"import sys, {module}; sys.exit(' '.join(sorted({{*{OPTIONAL}}} & set(sys.modules))) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{module} imports {done.stderr}"
