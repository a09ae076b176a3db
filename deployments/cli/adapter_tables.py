"""Adapters, aliases and operations as tables for a terminal."""

import time
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deployments.cli.admin_client import Json

_DIGEST_CHARS = 12


def print_adapters(document: Json) -> None:
    """One row for each adapter."""
    rows = [
        (
            adapter["name"],
            adapter["generation"],
            adapter["state"],
            "yes" if adapter["pinned"] else "",
            adapter["rank"],
            size(adapter["size_bytes"]),
            residency(adapter["replicas"]),
            adapter["source"],
        )
        for adapter in document["data"]
    ]
    heads = ("name", "generation", "state", "pinned", "rank", "size", "in memory", "source")
    print_table(heads, rows, empty="no adapters")


def print_adapter(adapter: Json) -> None:
    """Everything about one adapter."""
    table = Table(title=escape(adapter["name"]), show_header=False, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    facts = {
        "generation": adapter["generation"],
        "state": adapter["state"],
        "pinned": "yes" if adapter["pinned"] else "no",
        "source": adapter["source"],
        "digest": adapter["digest"],
        "base model": adapter["base_model"],
        "rank": adapter["rank"],
        "size": size(adapter["size_bytes"]),
        "loaded": f"{when(adapter['created_at'])} by {adapter['created_by'] or 'a request'}",
    }
    for name, value in facts.items():
        table.add_row(name, escape(str(value)))
    Console().print(table)
    places = [(r["replica_id"], place(r), r["num_running"] or "") for r in adapter["replicas"]]
    print_table(("replica", "weights", "requests"), places, empty="no replica")
    kept = [
        (k["generation"], k["digest"][:_DIGEST_CHARS], when(k["created_at"]), k["source"])
        for k in adapter["kept"]
    ]
    if kept:
        print_table(("kept generation", "digest", "loaded", "source"), kept)


def print_version(version: Json, verb: str) -> None:
    """What a change put in service, or took out of it."""
    Console().print(
        f"[bold green]{verb}[/] {escape(version['name'])}: generation {version['generation']}, "
        f"rank {version['rank']}, digest {version['digest'][:_DIGEST_CHARS]}",
        soft_wrap=True,
        highlight=False,
    )


def print_aliases(document: Json) -> None:
    """One row for each alias."""
    rows = [(a["alias"], targets(a["targets"]), a["generation"]) for a in document["data"]]
    print_table(("alias", "stands for", "generation"), rows, empty="no aliases")


def print_operations(document: Json) -> None:
    """One row for each operation, latest first."""
    rows = [
        (
            when(operation["started_at"]),
            operation["kind"],
            operation["name"],
            operation["phase"],
            operation["generation"] or "",
            operation["requested_by"],
            operation["id"],
            operation["reason"] or "",
        )
        for operation in document["data"]
    ]
    heads = ("started", "kind", "name", "phase", "generation", "by", "id", "reason")
    print_table(heads, rows, empty="no operations")


def print_operation(operation: Json) -> None:
    """One operation, replica by replica."""
    print_operations({"data": [operation]})
    rows = [(r["replica_id"], r["phase"], r["reason"]) for r in operation["replicas"]]
    if rows:
        print_table(("replica", "phase", "reason"), rows)


def print_table(heads: Iterable[str], rows: Iterable[Iterable[object]], *, empty: str = "") -> None:
    """A table, or a word if there is nothing in it."""
    table = Table(*heads, header_style="bold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    if empty and not table.row_count:
        Console().print(empty)
    else:
        Console().print(table)


def residency(replicas: list[Json]) -> str:
    """On how many replicas an adapter's weights are in memory, and in a slot."""
    host = sum(replica["host"] or replica["slot"] is not None for replica in replicas)
    slots = sum(replica["slot"] is not None for replica in replicas)
    return f"{host}/{len(replicas)}" + (f", {slots} in a slot" if slots else "")


def place(replica: Json) -> str:
    """Where one replica has an adapter's weights."""
    if replica["slot"] is not None:
        return f"slot {replica['slot']}"
    return "host memory" if replica["host"] else "not resident"


def targets(listed: list[Json]) -> str:
    """What an alias stands for, with shares if there are several."""
    if len(listed) == 1:
        return str(listed[0]["adapter"])
    total = sum(target["weight"] for target in listed)
    return ", ".join(f"{t['adapter']} ({t['weight'] / total:.1%})" for t in listed)


def size(num_bytes: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024 or unit == "TiB":
            return f"{num_bytes:,.0f} {unit}" if unit == "B" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")


def when(timestamp: float) -> str:
    """A moment in this machine's time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timestamp))
