"""How much faster the peers are with more threads."""

from tf_fused_ops.bench.contest import Contest, Contestant


def run(cases, peers, threads, effort, on_step):
    """Times every case with one thread and with several, in turns.

    Args:
        cases: A dict from name to case.
        peers: Names of `workers.PEERS`.
        threads: The number of threads that is compared with one.
        effort: A `contest.Effort`.
        on_step: Called with the case and mode that come next.

    Returns:
        A list of dicts: "name", "title", "mode", and "peers", a dict from peer to "ms", a list with
        the time of one thread and of several, and "speedup"; or to "error".
    """
    contestants = [Contestant(peer, count) for peer in peers for count in (1, threads)]
    results = []
    with Contest(contestants, effort) as contest:
        for name, case in cases.items():
            for mode in case.modes:
                on_step(case, mode)
                timings = contest.run(name, case.dtype, mode)
                measured = {
                    peer: _compare(timings[peer, 1], timings[peer, threads]) for peer in peers
                }
                results.append(
                    {"name": name, "title": case.title(), "mode": mode, "peers": measured}
                )
    return results


def _compare(one, several):
    if one.error or several.error:
        return {"error": one.error or several.error}
    return {
        "ms": [1e3 * one.median, 1e3 * several.median],
        "speedup": one.median / several.median,
    }
