from __future__ import annotations

import gc

import psutil

#: Requests made before the first look, while caches and pools fill up, and between the two looks.
WARM_UP, REQUESTS, TOGETHER = 2000, 4000, 100
#: Bytes. Measured of 10,000: 0.05 MiB; with messages to a detokenizer that is not there 1.7 MiB,
#: with every row kept 18 MiB.
BOUND = 400 << 10


def test_thousands_of_requests_leave_memory_where_it_was(load_tiny, contexts):
    hooks = load_tiny(max_total_tokens=2048)

    def ask(requests: range) -> None:
        for seed in requests[::TOGETHER]:
            hooks.rows(dict.fromkeys(contexts(TOGETHER, 3, 30, seed)))

    def resident() -> int:
        gc.collect()
        return psutil.Process().memory_info().rss

    ask(range(WARM_UP))
    before = resident()
    ask(range(WARM_UP, WARM_UP + REQUESTS))
    assert resident() - before < BOUND
