"""Every query of the dashboard and of the alerts names metrics that exist, and gives data in a real Prometheus."""

import json
import math
import os
import re
import runpy
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import pytest
from monitored import Monitored
from prometheus_client.core import Metric

from kpt_serve.metrics import exposition

RULES = Path(str(files("kpt_serve") / "metrics" / "rules.yml"))
DASHBOARD = Path(__file__).parents[4] / "deploy" / "monitoring" / "dashboard.json"
MISSING = "there is no {}: set KPT_PROMETHEUS to the folder that tests/metrics/fetch_prometheus.sh prints"

_WORD = re.compile(r"[a-zA-Z_:][\w:]*")
#: In braces and brackets are labels and times, in quotes are values.
_NO_METRICS = re.compile(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]|\b(?:by|on) \([^)]*\)')
_FUNCTIONS = {"sum", "rate", "increase", "histogram_quantile", "topk", "max", "avg", "or", "and", "unless", "bool"}


def tool(name: str) -> str:
    """Return the path of a program of Prometheus, or skip."""
    found = shutil.which(name, path=os.environ.get("KPT_PROMETHEUS")) or shutil.which(name)
    if found is None:
        pytest.skip(MISSING.format(name))
    return found


def panels() -> list[dict[str, Any]]:
    """Return the panels with queries."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def dashboard_queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def alerts() -> dict[str, str]:
    """Return the expression of each alert, read without a parser of YAML."""
    found = re.findall(r"- alert: (\w+)\n((?:.*\n)*?)        labels:", RULES.read_text())
    one_line = re.compile(r"^        expr: (?!\|)(.*)$", re.M)
    block = re.compile(r"^        expr: \|\n((?:          .*\n)+)", re.M)
    return {name: (one_line.search(body) or block.search(body))[1].strip() for name, body in found}


def parts(expression: str) -> list[str]:
    """Return what an alert compares with numbers, each of which must give data."""
    sides = re.split(r"\n\s*(?:and|unless) on \([^)]*\)\s", expression)
    return [re.split(r" [<>] [\d.]+", side)[0].strip() for side in sides]


QUERIES = [*dashboard_queries(), *(part for alert in alerts().values() for part in parts(alert))]


def names(query: str) -> set[str]:
    """Return the metrics that a query names."""
    by_regex = re.findall(r'__name__=~"([^"]*)"', query)
    words = set(_WORD.findall(_NO_METRICS.sub(" ", query))) - _FUNCTIONS
    return words | {name for each in by_regex for name in each.split("|")}


def given(metric: Metric) -> set[str]:
    """Return the names of its series."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(metric.type, ("",))
    return {metric.name + suffix for suffix in suffixes}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:grafana_foundation_sdk")
def test_the_dashboard_is_what_its_script_writes():
    pytest.importorskip("grafana_foundation_sdk", reason="install grafana-foundation-sdk==0.0.21")
    assert runpy.run_path(str(DASHBOARD.with_name("make_dashboard.py")))["build"]() == DASHBOARD.read_text()


def test_queries_are_found():
    assert len(panels()) == 18
    assert set(alerts()) == set(re.findall(r"alert: (\w+)", RULES.read_text()))
    assert names('(sum by (op) (rate(a_total{b="c"}[5m])) or d * 0) / d > 0.5') == {"a_total", "d"}
    assert parts("a / b > 0.5 < 1\n and on (job) sum(c) > 10") == ["a / b", "sum(c)"]


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_is_balanced_and_names_metrics_that_the_collectors_give(query):
    bare = re.sub(r'"[^"]*"', "", query)
    assert all(bare.count(a) == bare.count(b) for a, b in ("()", "[]", "{}"))
    assert query.count('"') % 2 == 0
    existing = {name for metric in Monitored().registry.collect() for name in given(metric)}
    assert names(query)
    assert names(query) <= existing


def test_each_of_our_metrics_is_on_the_dashboard():
    shown = set().union(*map(names, dashboard_queries()))
    ours = [metric for metric in Monitored().registry.collect() if metric.name.startswith("kpt_")]
    assert [metric.name for metric in ours if not given(metric) & shown] == []


def test_each_alert_fires_in_the_tests_of_rules():
    tests = RULES.with_name("rules.test.yml").read_text()
    assert set(re.findall(r"alertname: (\w+)\n        exp_alerts:", tests)) == set(alerts())


def test_rules_are_valid_and_each_alert_fires_and_is_silent():
    promtool = tool("promtool")
    subprocess.run([promtool, "check", "rules", str(RULES)], check=True, capture_output=True)
    done = subprocess.run(
        [promtool, "test", "rules", str(RULES.with_name("rules.test.yml"))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_names_and_help_are_as_prometheus_wants_them():
    promtool = tool("promtool")
    server = Monitored()
    server.happen()
    # `_created` is the client's own, and a platform's `python_info` too.
    body = "".join(
        line
        for line in exposition(server.registry, None)[0].decode().splitlines(keepends=True)
        if "_created" not in line
    )
    done = subprocess.run([promtool, "check", "metrics"], input=body, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """A Prometheus that scrapes a server which answers requests meanwhile."""

    def __init__(self, program: str, folder: Path) -> None:
        self.server = Monitored()
        registry = self.server.registry

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, content_type = exposition(registry, self.headers.get("Accept"))
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        Thread(target=self._http.serve_forever, daemon=True).start()
        config = folder / "prometheus.yml"
        config.write_text(
            f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: ['{RULES}']\n"
            "scrape_configs: [{job_name: kpt, static_configs: [{targets: "
            f"['127.0.0.1:{self._http.server_port}']}}]}}]\n"
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self._log = (folder / "log").open("w+b")
        arguments = (f"--config.file={config}", f"--storage.tsdb.path={folder}/data")
        self._process = subprocess.Popen(
            [program, *arguments, f"--web.listen-address={self.address}"], stdout=self._log, stderr=self._log
        )

    def get(self, path: str) -> Any:
        with urlopen(f"http://{self.address}/api/v1/{path}", timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, query: str) -> list[float]:
        return [float(each["value"][1]) for each in self.get(f"query?query={quote(query)}")["result"]]

    def scrape(self, times: int) -> None:
        """Let requests come until so many scrapes are done."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            self.server.happen()
            time.sleep(0.2)
            try:
                if sum(self.query("count_over_time(up[1h])")) >= times and self.query("up") == [1]:
                    return
            except URLError:  # it has not started
                assert self._process.poll() is None, Path(self._log.name).read_text()
        raise AssertionError(f"no {times} scrapes in a minute: {Path(self._log.name).read_text()}")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._http.shutdown()
        self._http.server_close()
        self._log.close()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    running = Prometheus(tool("prometheus"), tmp_path_factory.mktemp("prometheus"))
    try:
        running.scrape(5)
        yield running
    finally:
        running.close()


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_gives_data_though_nothing_failed(prometheus, query):
    asked = re.sub(r"\$(job|instance)\b", ".*", query.replace("$__rate_interval", "1m"))
    values = prometheus.query(asked)
    # NaN is a share of an op that other tests called, and nobody now.
    assert any(not math.isnan(value) for value in values), f"{asked} gives {values}"


def test_every_rule_is_evaluated(prometheus):
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"]: rule["health"] for rule in rules} == dict.fromkeys(alerts(), "ok")
