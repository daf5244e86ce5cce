"""Requests that schemathesis makes of the protocol's description: nothing of them ends in a 5xx or in another form."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from serving import HIDDEN, NAME, Server


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


TEXT: dict[str, Any] = {"type": "string"}
NUMBERS = {"type": "array", "items": {"type": "number"}, "minItems": HIDDEN, "maxItems": HIDDEN}
INPUT = _object(
    {
        "name": {"enum": ["input"]},
        "datatype": {"enum": ["FP32"]},
        "shape": {"enum": [[1, 1, HIDDEN]]},
        "data": NUMBERS,
    },
    parameters={"type": "object"},
)
REQUEST = _object({"inputs": {"type": "array", "items": INPUT, "minItems": 1, "maxItems": 1}}, id=TEXT)
ERROR = {"description": "error", "content": {"application/json": {"schema": _object({"error": TEXT})}}}


def _good(schema: dict[str, Any]) -> dict[str, Any]:
    return {"200": {"description": "good", "content": {"application/json": {"schema": schema}}}, "4XX": ERROR}


def _get(schema: dict[str, Any]) -> dict[str, Any]:
    return {"get": {"responses": _good(schema)}}


def test_no_request_ends_in_a_failure(server: Server, tmp_path: Path) -> None:
    answer = _object({"model_name": {"enum": [NAME]}, "outputs": {"type": "array", "minItems": 1}})
    body = {"required": True, "content": {"application/json": {"schema": REQUEST}}}
    model = {"name": "name", "in": "path", "required": True, "schema": {"enum": [NAME]}}
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Open Inference Protocol v2", "version": "2"},
        "paths": {
            "/v2": _get(_object({"name": TEXT, "version": TEXT, "extensions": {"type": "array"}})),
            "/v2/health/live": _get(_object({"live": {"type": "boolean"}})),
            "/v2/health/ready": _get(_object({"ready": {"type": "boolean"}})),
            "/v2/models/{name}": {"parameters": [model], **_get(_object({"name": TEXT, "inputs": {"type": "array"}}))},
            "/v2/models/{name}/ready": {"parameters": [model], **_get(_object({"ready": {"type": "boolean"}}))},
            "/v2/models/{name}/infer": {
                "parameters": [model],
                "post": {"requestBody": body, "responses": _good(answer)},
            },
        },
    }
    (tmp_path / "oip.json").write_text(json.dumps(document))
    command = [sys.executable, "-m", "schemathesis.cli", "run", "oip.json", "--url", f"http://127.0.0.1:{server.port}"]
    command += ["--max-examples=60", "--seed=1", "--checks=not_a_server_error,status_code_conformance"]
    command[-1] += ",content_type_conformance,response_schema_conformance"
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert server.process.poll() is None
