"""Write dashboard.json beside this file, by Grafana's own builders.

    pip install grafana-foundation-sdk==0.0.21
    python deploy/monitoring/make_dashboard.py

Pin that version: pip takes 1769699998!10.1.0, an older one, for newer.
"""

from pathlib import Path

from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import DataSourceRef
from grafana_foundation_sdk.models.dashboard import VariableRefresh

OUT = Path(__file__).with_name("dashboard.json")
DATA = DataSourceRef(type_val="prometheus", uid="${datasource}")
ON = 'job=~"$job", instance=~"$instance"'
FAILED = 'code=~"5..|INTERNAL|UNKNOWN|UNAVAILABLE|DATA_LOSS|DEADLINE_EXCEEDED", code!="503"'
REFUSED = 'code=~"503|RESOURCE_EXHAUSTED"'


def rate(name: str, by: str = "", where: str = "") -> str:
    """Return the sum of a counter's rates."""
    inside = ", ".join(filter(None, (ON, where)))
    return f"sum {f'by ({by}) ' if by else ''}(rate({name}{{{inside}}}[$__rate_interval]))"


def share(name: str, where: str, by: str = "") -> str:
    """Return a part of a counter over all of it; 0, not nothing, where no series is of the part."""
    return f"({rate(name, by, where)} or {rate(name, by)} * 0) / {rate(name, by)}"


def mean(name: str, by: str = "") -> str:
    """Return the mean of a histogram."""
    return f"{rate(f'{name}_sum', by)} / {rate(f'{name}_count', by)}"


def quantiles(name: str, by: str = "") -> dict[str, str]:
    """Return the median and the slow end of a histogram, by legend."""
    legend = "".join(f" {{{{{each}}}}}" for each in by.split(", ") if each)
    return {
        f"p{percent}{legend}": f"histogram_quantile({percent / 100}, {rate(f'{name}_bucket', f'le, {by}'.strip(', '))})"
        for percent in (50, 95, 99)
    }


#: Row, then panels: title, unit, and queries by legend.
ROWS: dict[str, list[tuple[str, str, dict[str, str]]]] = {
    "Requests": [
        ("Requests by code", "reqps", {"{{protocol}} {{code}}": rate("kpt_requests_total", "protocol, code")}),
        (
            "Errors and refusals",
            "percentunit",
            {
                "errors": share("kpt_requests_total", FAILED),
                "refused": share("kpt_requests_total", REFUSED),
            },
        ),
        ("Time of a request", "s", quantiles("kpt_request_duration_seconds", "protocol")),
        (
            "Requests of a batch, waiting",
            "short",
            {
                "mean batch": mean("kpt_batch_requests"),
                "waiting {{instance}}": f"kpt_requests_waiting{{{ON}}}",
            },
        ),
    ],
    "Text": [
        ("Time to the first token", "s", quantiles("kpt_time_to_first_token_seconds")),
        ("Time between tokens", "s", quantiles("kpt_inter_token_latency_seconds")),
        ("Time to the last token", "s", quantiles("kpt_e2e_request_latency_seconds")),
        (
            "Tokens",
            "short",
            {
                "prompts/s": rate("kpt_prompt_tokens_total"),
                "generated/s": rate("kpt_generation_tokens_total"),
                "running {{instance}}": f"kpt_num_requests_running{{{ON}}}",
                "waiting {{instance}}": f"kpt_num_requests_waiting{{{ON}}}",
            },
        ),
    ],
    "Kernels": [
        ("Calls by backend", "ops", {"{{op}} {{backend}}": rate("kpt_kernel_calls_total", "op, backend")}),
        (
            "Served by plain PyTorch",
            "percentunit",
            {"{{op}}": share("kpt_kernel_calls_total", 'backend=~"torch|reference"', "op")},
        ),
        ("Errors of kernels", "ops", {"{{kernel}}": rate("kpt_kernel_failures_total", "kernel")}),
        (
            "Quarantined kernels, accelerators",
            "short",
            {
                "quarantined {{kernel}}": f"sum by (kernel) (kpt_kernel_quarantined{{{ON}}})",
                "accelerators {{instance}}": f"kpt_accelerators{{{ON}}}",
            },
        ),
    ],
    "Experts and training": [
        (
            "Busiest experts",
            "cps",
            {"{{router}} {{expert}}": f"topk(10, {rate('kpt_moe_expert_tokens_total', 'router, expert')})"},
        ),
        (
            "Busiest expert over the mean",
            "short",
            {"{{router}}": f"max by (router) (kpt_moe_load_imbalance_ratio{{{ON}}})"},
        ),
        ("Refused choices", "cps", {"{{router}}": rate("kpt_moe_dropped_choices_total", "router")}),
        (
            "FP8 steps",
            "cps",
            {"tried": rate("kpt_fp8_steps_total"), "skipped": rate("kpt_fp8_skipped_steps_total")},
        ),
    ],
    "Process": [
        ("Memory of the host", "bytes", {"{{instance}}": f"process_resident_memory_bytes{{{ON}}}"}),
        ("CPU cores", "short", {"{{instance}}": rate("process_cpu_seconds_total", "instance")}),
    ],
}


def variable(name: str, query: str) -> dashboard.QueryVariable:
    """Return a choice of some or all values of a label."""
    made = dashboard.QueryVariable(name).datasource(DATA).query({"query": query, "refId": name})
    return made.multi(True).include_all(True).all_value(".*").refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)


def build() -> str:
    """Return the dashboard as JSON."""
    made = dashboard.Dashboard("KPT").uid("kpt").tags(["kpt"]).refresh("30s").time("now-1h", "now")
    made = made.with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
    made = made.with_variable(variable("job", "label_values(kpt_accelerators, job)"))
    made = made.with_variable(variable("instance", 'label_values(kpt_accelerators{job=~"$job"}, instance)'))
    for row, panels in ROWS.items():
        made = made.with_row(dashboard.Row(row))
        for title, unit, queries in panels:
            panel = timeseries.Panel().title(title).unit(unit).datasource(DATA).span(6).height(7).min(0)
            for place, (legend, query) in enumerate(queries.items()):
                target = prometheus.Dataquery().expr(query).legend_format(legend).ref_id("ABCD"[place])
                panel = panel.with_target(target)
            made = made.with_panel(panel)
    return JSONEncoder(sort_keys=True, indent=1).encode(made.build()) + "\n"


if __name__ == "__main__":
    OUT.write_text(build(), encoding="utf-8")
