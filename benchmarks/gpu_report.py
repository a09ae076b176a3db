"""The GPU check's report as tables, and which targets it missed. Reads the report alone."""

from collections.abc import Iterator
from typing import Any

Report = dict[str, Any]

MIN_RATIO_TO_BASE = 0.90
MIN_OVER_PEFT = 30.0
MIN_COPY_SHARE = 0.80
# Smaller launches are bound by their latency, which no bandwidth shortens.
_LARGE_BYTES = 64 << 20


def missed_targets(report: Report) -> list[str]:
    """Return each target that a measurement missed; what was not measured is not among them."""
    return [*_missed_ratios(report), *_missed_peft(report), *_missed_bandwidth(report)]


def _rows(report: Report, section: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = report["sections"].get(section, {}).get("rows", [])
    return rows


def _missed_ratios(report: Report) -> Iterator[str]:
    for row in _rows(report, "engine"):
        ratio = row["ratio_to_base"]
        if row["num_adapters"] == 32 and ratio is not None and ratio < MIN_RATIO_TO_BASE:
            yield (
                f"decode of {row['batch']} with 32 adapters on {row['targets']} is {ratio:.3f} "
                f"of base, not {MIN_RATIO_TO_BASE}"
            )


def over_peft(report: Report) -> float | None:
    """Return the engine's rate over PEFT's for the same batch and adapters, None if unmeasured."""
    peft = report["sections"].get("peft", {})
    if "tokens_per_s" not in peft:
        return None
    same = ("batch", "num_adapters", "targets")
    for row in _rows(report, "engine"):
        if all(row[name] == peft[name] for name in same):
            return float(row["tokens_per_s"] / peft["tokens_per_s"])
    return None


def _missed_peft(report: Report) -> Iterator[str]:
    ratio = over_peft(report)
    if ratio is not None and ratio < MIN_OVER_PEFT:
        yield f"{ratio:.1f} times PEFT's mixed batch, not {MIN_OVER_PEFT:.0f}"


def _missed_bandwidth(report: Report) -> Iterator[str]:
    for row in _rows(report, "bandwidth"):
        is_large = row["is_memory_bound"] and row["bytes"] >= _LARGE_BYTES
        if is_large and row["copy_share"] < MIN_COPY_SHARE:
            yield (
                f"{row['op']} {row['shape']} moves {row['copy_share']:.2f} of copy bandwidth, "
                f"not {MIN_COPY_SHARE}"
            )


def as_markdown(report: Report) -> str:
    """Return the report's tables."""
    setup = report["setup"]
    lines = [
        f"# {setup['device_name']}",
        "",
        f"torch {setup['torch_version']}, triton {setup['triton_version']}, {setup['dtype']}; "
        f"copy {setup['copy_bytes_per_s'] / 1e9:.0f} GB/s, "
        f"matrix products {setup['matmul_flops_per_s'] / 1e12:.1f} TFLOP/s; "
        f"model {report['model']['name']}.",
        "",
    ]
    for name, write in (
        ("numerics", _numerics_table),
        ("bandwidth", _bandwidth_table),
        ("engine", _engine_table),
    ):
        lines += [f"## {name}", "", *write(report), ""]
    lines += ["## uploads and PEFT", "", *_other(report), "", "## targets missed", ""]
    lines += [f"- {missed}" for missed in report["missed_targets"]] or ["none of those measured"]
    skipped = [
        f"- {name}: {what}"
        for name, found in report["sections"].items()
        for what in found.get("skipped", ())
    ]
    return "\n".join([*lines, *(["", "## skipped", "", *skipped] if skipped else [])]) + "\n"


def _numerics_table(report: Report) -> Iterator[str]:
    yield "| op | largest error / tolerance |"
    yield "| --- | --- |"
    for op, error in sorted(report["sections"]["numerics"].get("error_to_tolerance", {}).items()):
        yield f"| {op} | {error:.3f} |"


def _bandwidth_table(report: Report) -> Iterator[str]:
    yield "| op | shape | us | share of copy | times floor |"
    yield "| --- | --- | --- | --- | --- |"
    for row in _rows(report, "bandwidth"):
        yield (
            f"| {row['op']} | {row['shape']} | {row['time_s'] * 1e6:.1f} "
            f"| {row['copy_share']:.2f} | {row['ratio_to_floor']:.1f} |"
        )


def _engine_table(report: Report) -> Iterator[str]:
    rows = _rows(report, "engine")
    devices = [*rows[0]["predicted_ratio"]] if rows else []
    predicted = "".join(f" predicted {device} |" for device in devices)
    yield f"| batch | adapters | on | tokens/s | of base |{predicted}"
    yield "| --- | --- | --- | --- | --- |" + " --- |" * len(devices)
    for row in rows:
        ratio = "" if row["ratio_to_base"] is None else f"{row['ratio_to_base']:.3f}"
        predictions = "".join(
            f" {row['batch'] / row['predicted_step_s'][device]:.0f}, "
            f"{row['predicted_ratio'][device]:.3f} |"
            for device in devices
        )
        yield (
            f"| {row['batch']} | {row['num_adapters']} | {row['targets']} "
            f"| {row['tokens_per_s']:.1f} | {ratio} |{predictions}"
        )


def upload_line(uploads: dict[str, Any]) -> str:
    """Say what a batch notices of an upload."""
    return (
        f"While an adapter of {uploads['adapter_bytes'] / 1e6:.1f} MB is uploaded, a batch of "
        f"{uploads['batch']} computes {uploads['steps_while_uploading']:.0f} steps of "
        f"{uploads['usual_step_s'] * 1e3:.2f} ms, the slowest of them "
        f"{uploads['stall_while_uploading_s'] * 1e3:.2f} ms longer; putting it into its slot takes "
        f"{uploads['slot_write_s'] * 1e3:.2f} ms (largest of either "
        f"{uploads['largest_stall_s'] * 1e3:.2f} ms)."
    )


def _other(report: Report) -> Iterator[str]:
    uploads = report["sections"].get("uploads", {})
    if "adapter_bytes" in uploads:
        yield f"- {upload_line(uploads)}"
    peft = report["sections"].get("peft", {})
    if "tokens_per_s" in peft:
        ratio = over_peft(report)
        times = "" if ratio is None else f"; the engine is {ratio:.1f} times as fast"
        yield (
            f"- PEFT's mixed batch of {peft['batch']} over {peft['num_adapters']} adapters: "
            f"{peft['tokens_per_s']:.1f} tokens/s{times}."
        )
