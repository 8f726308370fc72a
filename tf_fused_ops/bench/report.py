"""The results: as data, and as tables for people, in Markdown."""

import datetime
import statistics

from tf_fused_ops._version import __version__
from tf_fused_ops.bench import costs, machine, memory, table
from tf_fused_ops.bench.cases import MODES
from tf_fused_ops.bench.workers import OURS, PEERS, WINOGRAD

STOCK = "stock"
# The share of its median over which a time's rounds may spread before that is said.
UNSTEADY = 0.2
MODE_TITLES = {"forward": "forward", "step": "training step"}


def heading(settings, roofs=None):
    """What every report begins with.

    Args:
        settings: A dict of what was asked for.
        roofs: A `machine.Roofs`, or None where nothing was timed.

    Returns:
        A dict with the keys "version", "time", "machine", "settings", and "roofs" in operations and
        bytes a second.
    """
    return {
        "version": __version__,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "settings": settings,
        "roofs": roofs and roofs._asdict(),
    }


def collect(settings, roofs, results):
    """Everything as one dict for JSON.

    Args:
        settings: As for `heading`.
        roofs: A `machine.Roofs`.
        results: A list of (name, case, mode, dict from peer to `contest.Timing`).

    Returns:
        The dict of `heading` and the keys "cases" and "geometric means". Times are in milliseconds.
    """
    cases = [_case(roofs, *result) for result in results]
    return {
        **heading(settings, roofs),
        "cases": cases,
        "geometric means": [
            {"group": group, "mode": mode, **_means(chosen)}
            for group in dict.fromkeys(case["group"] for case in cases)
            for mode in MODES
            if (chosen := [c for c in cases if c["group"] == group and c["mode"] == mode])
        ],
    }


def _case(roofs, name, case, mode, timings):
    work = costs.work(case, mode)
    limit = 1e3 * work.limit_seconds(roofs)
    peers = {peer: _peer(timing) for peer, timing in timings.items()}
    others = {peer: values["ms"] for peer, values in peers.items() if peer not in (OURS, WINOGRAD)}
    others = {peer: ms for peer, ms in others.items() if ms is not None}
    best = min(others, key=others.get, default=None)
    ours = peers.get(OURS, {}).get("ms")
    return {
        "name": name,
        "group": table.group_of(name),
        "title": case.title(),
        "mode": mode,
        "macs": work.macs,
        "bytes": work.bytes,
        "limit_ms": limit,
        "peers": peers,
        "best_peer": best,
        "ratio_to_stock": _ratio(others.get(STOCK), ours),
        "ratio_to_best": _ratio(others.get(best), ours),
        "fraction_of_limit": _ratio(limit, ours),
    }


def _peer(timing):
    if timing.error is not None:
        return {"ms": None, "error": timing.error}
    values = {
        "ms": 1e3 * timing.median,
        "least_ms": 1e3 * timing.least,
        "spread": timing.spread,
        "slow_rounds": timing.slow_rounds,
    }
    return values if timing.doubt is None else {**values, "doubt": timing.doubt}


def _ratio(above, below):
    return None if above is None or below is None else above / below


def _means(cases):
    keys = ("ratio_to_stock", "ratio_to_best", "fraction_of_limit")
    return {key: _geometric_mean([case[key] for case in cases]) for key in keys}


def _geometric_mean(values):
    values = [value for value in values if value is not None]
    return statistics.geometric_mean(values) if values else None


def hardware(report):
    """What a report's times were taken on, and the dtype."""
    described, settings = report["machine"], report["settings"]
    if "graphics card" in settings:
        return f"{settings['graphics card']}; {settings['dtype']}"
    return (
        f"{described['processor']}, {settings['threads']} of {described['cores']} cores, "
        f"{described['instruction set']}; {settings['dtype']}"
    )


def lines(report):
    """A report as lines of Markdown, with the tables for which it has data.

    A ratio above one means that tf_fused_ops is faster.
    """
    yield hardware(report)
    roofs = report["roofs"]
    if roofs:
        yield (
            f"measured limits: {roofs['operations'] / 1e9:.0f} GFLOP/s, "
            f"{roofs['bytes'] / 1e9:.1f} GB/s copied (bytes read and written)"
        )
        if roofs["tiles"]:
            yield _tiles(machine.Roofs(**roofs))
    for key, tables in (("cases", _times), ("memory", _memory), ("scaling", _scaling)):
        if report.get(key):
            yield from tables(report)


def _tiles(roofs):
    rate = f"AMX: {roofs.tiles / 1e9:.0f} GFLOP/s in bfloat16, "
    times = f"{roofs.tiles / roofs.operations:.1f} times that"
    return rate + times + ("" if roofs.tiles_pay else "; TF_FUSED_OPS_ISA=avx512 may be faster")


def _times(report):
    for mode, title in MODE_TITLES.items():
        cases = [case for case in report["cases"] if case["mode"] == mode]
        if cases:
            yield ""
            yield from _table(title, cases, report)
    yield from _errors(report["cases"])
    for remark in (_doubt, _unsteady, _slow):
        remarks = [
            f"{PEERS[peer]}, {case['title']}, {MODE_TITLES[case['mode']]}: {text}"
            for case in report["cases"]
            for peer, values in case["peers"].items()
            if (text := remark(values))
        ]
        if remarks:
            yield from ["", *remarks]


def _doubt(values):
    if "doubt" in values:
        return f"{values['doubt']} from the same in float32; timed all the same"
    return None


def _unsteady(values):
    if values.get("spread", 0) > UNSTEADY:
        return f"the rounds' medians spread over {values['spread']:.0%} of their median"
    return None


def _slow(values):
    if values.get("slow_rounds", 0) > 0:
        return f"the machine stayed slow beside {values['slow_rounds']} of the rounds"
    return None


def _errors(results):
    """What failed, once for each peer, message and case."""
    errors = {
        (peer, values["error"], result["title"])
        for result in results
        for peer, values in result["peers"].items()
        if "error" in values
    }
    if errors:
        yield ""
    for peer, error, title in sorted(errors):
        yield f"{PEERS[peer]}, {title}: {error}"


def _memory(report):
    peers = list(report["memory"][0]["peers"])
    rows = []
    for result in report["memory"]:
        needed = {peer: memory.over_start(values) for peer, values in result["peers"].items()}
        share = _ratio(needed.get(OURS), needed.get(STOCK))
        cells = ["-" if value is None else f"{value:.0f}" for value in needed.values()]
        rows.append([result["title"], *cells, "-" if share is None else f"{share:.2f}"])
    yield ""
    title = "training step, MB over the start"
    yield from markdown([title, *map(PEERS.get, peers), "share of TF"], rows)
    yield from _errors(report["memory"])


def _scaling(report):
    results = report["scaling"]
    peers = list(results[0]["peers"])
    for mode, title in MODE_TITLES.items():
        rows = [
            [
                result["title"],
                *(_speedup(values) for values in result["peers"].values()),
                *map(_number, result["peers"].get(OURS, {}).get("ms", ())),
            ]
            for result in results
            if result["mode"] == mode
        ]
        threads = report["settings"]["threads"]
        header = [f"{title}, 1 to {threads} threads", *map(PEERS.get, peers)]
        if OURS in peers:
            header += [f"{PEERS[OURS]}, ms: 1", str(threads)]
        yield ""
        yield from markdown(header, [row + ["-"] * (len(header) - len(row)) for row in rows])
    yield from _errors(results)


def _speedup(values):
    return f"{values['speedup']:.2f}x" if "speedup" in values else "-"


def _table(title, cases, report):
    peers = [peer for peer in PEERS if peer in cases[0]["peers"]]
    header = [f"{title}, ms", "limit", *map(PEERS.get, peers), "to TF", "to best", "of limit"]
    rows = []
    for group in dict.fromkeys(case["group"] for case in cases):
        chosen = [case for case in cases if case["group"] == group]
        for case in chosen:
            times = [_time(case["peers"][peer]) for peer in peers]
            rows.append([case["title"], _number(case["limit_ms"]), *times, *_verdict(case)])
        if len(chosen) > 1:
            mode = chosen[0]["mode"]
            means = next(
                m for m in report["geometric means"] if (m["group"], m["mode"]) == (group, mode)
            )
            name = f"geometric mean, {group.replace('_', ' ')}"
            rows.append([name, "", *[""] * len(peers), *_verdict(means)])
    return markdown(header, rows)


def _verdict(values):
    yield _relative(values["ratio_to_stock"])
    yield _relative(values["ratio_to_best"])
    share = values["fraction_of_limit"]
    yield "-" if share is None else f"{share:.0%}"


def _relative(ratio):
    if ratio is None:
        return "-"
    return f"{ratio:.2f}x" + (" slower" if ratio < 0.995 else "")


def _time(peer):
    return "-" if peer["ms"] is None else _number(peer["ms"])


def _number(ms):
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 10 else f"{ms:.1f}"


def markdown(header, rows):
    """Yields the lines of a table whose columns are aligned, the first one to the left."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells):
        first, *others = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join([first, *others])} |"

    yield line(header)
    yield f"|{'|'.join('-' * (w + 1) + (':' if i else '-') for i, w in enumerate(widths))}|"
    yield from map(line, rows)
