from __future__ import annotations

import gc

import psutil

#: Requests made before the first look, while caches and pools fill up; then at most so many rounds.
WARM_UP, ROUNDS, REQUESTS, TOGETHER = 1000, 8, 1000, 100
#: Bytes a round. What leaks does so in every round; an allocator that takes another arena does it
#: in one. Measured of 1,000 requests: 4 to 16 KiB; with messages to a detokenizer that is not there
#: 170 KiB, with every row kept 1.8 MiB.
BOUND = 64 << 10


def test_thousands_of_requests_leave_memory_where_it_was(load_tiny, contexts):
    hooks = load_tiny(max_total_tokens=2048)

    def resident_after(requests: range) -> int:
        for seed in requests[::TOGETHER]:
            hooks.rows(dict.fromkeys(contexts(TOGETHER, 3, 30, seed)))
        gc.collect()
        return psutil.Process().memory_info().rss

    resident, grown = resident_after(range(WARM_UP)), []
    for start in range(WARM_UP, WARM_UP + ROUNDS * REQUESTS, REQUESTS):
        before, resident = resident, resident_after(range(start, start + REQUESTS))
        grown.append(resident - before)
        if grown[-1] < BOUND:
            return
    raise AssertionError(grown)
