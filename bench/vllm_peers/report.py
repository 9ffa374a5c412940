"""The tables, at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import wrap
from typing import Any

from workloads import Workload

WIDTHS = (7, 6, 6, 6, 7, 5, 6, 6, 6, 6, 5)
OWN = {"kvoffload", "kvoffload rri", "kvoffload+disk"}


def _mib(value: int) -> str:
    return f"{value / (1 << 20):.1f}"


def show(name: str, workload: Workload, rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Two tables: what was served, and what that took."""
    sizes = (
        f"engine {_mib(workload.pool)} MiB, host {_mib(workload.host)} MiB, disk {_mib(workload.disk)} MiB"
    )
    out = [f"== {name}: {workload.text}", f"   {sizes}", ""]
    out.append(
        f"{'tokens':15} {'from host':>10} {'from disk':>10} {'computed':>9} {'computed again':>15} {'equal':>8}"
    )
    for peer, row in rows.items():
        equal = f"{row['equal']}/{row['requests']}"
        note = f" {row['stuck']} hung" if row["stuck"] else ""
        out.append(
            f"{peer:15} {row['hit_host']:>10} {row['hit_disk']:>10} {row['computed']:>9} {row['recomputed']:>15}"
            f" {equal:>8}{note}"
        )
    out += ["", f"{'':15}{'stored':^25}{'loaded':^12}{'MiB used':^12}{'us per step':^17}"]
    out.append(
        f"{'':15}{'blocks':>7}{'again':>6}{'twice':>6}{'MiB':>6}{'blocks':>7}{'MiB':>5}{'host':>6}{'disk':>6}"
        f"{'sched':>6}{'p90':>6}{'work':>5}"
    )
    for peer, row in rows.items():
        if "stored_blocks" in row:
            out.append(f"{peer:15}{_cost(row)}")
    shares = (f"{peer} {100 * sum(row['share']):.2f}" for peer, row in rows.items() if "stored_blocks" in row)
    return [
        *out,
        "",
        *wrap("connector calls in % of step time, copies left out: " + ", ".join(shares), 80),
        "",
    ]


def _cost(row: Mapping[str, Any]) -> str:
    values = (
        row["stored_blocks"],
        row["stored_again"],
        row["stored_twice"],
        _mib(row["stored_bytes"]),
        row["loaded_blocks"],
        _mib(row["loaded_bytes"]),
        _mib(row["host_bytes"]),
        _mib(row["disk_bytes"]),
        *(f"{us:.0f}" for us in (*row["scheduler_us"], row["worker_us"][0])),
    )
    return "".join(f"{value:>{width}}" for value, width in zip(values, WIDTHS, strict=True))


def worse(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Where kvoffload had fewer hits than another with as many tiers, stored a block twice, or tokens differed.

    Hits are told by what was left to compute: a peer that loads one prefix for each of several requests serves more
    tokens and saves no more.
    """
    out = []
    for name, rows in found.items():
        for peer, row in rows.items():
            if row["equal"] < row["requests"]:
                out.append(
                    f"{name}: {peer}: {row['requests'] - row['equal']} answers differ from no connector"
                )
            own = "kvoffload+disk" if peer in ("tiering+fs", "simple disk") else "kvoffload"
            mine = rows.get(own)
            if mine is None or peer == "none":
                continue
            if peer == own and row["stored_twice"]:
                out.append(f"{name}: {peer} stored {row['stored_twice']} blocks twice")
            if peer not in OWN and row["recomputed"] < mine["recomputed"]:
                out.append(
                    f"{name}: {peer} computed {row['recomputed']} tokens again, {own} {mine['recomputed']}"
                )
    return out
