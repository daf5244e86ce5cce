"""vLLM lies in an environment beside the workspace: `nox -s vllm`. Without it only what needs none of it is tested."""

from importlib.util import find_spec

if find_spec("vllm") is None:
    collect_ignore = ["test_layers.py", "test_models.py"]
