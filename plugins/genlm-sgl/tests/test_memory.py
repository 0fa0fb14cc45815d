from __future__ import annotations

import gc

import psutil

#: How many requests are made before the first measurement, while caches and pools fill up, and the
#: most rounds after it.
WARM_UP, ROUNDS, REQUESTS, TOGETHER = 1000, 8, 1000, 100
#: Bytes a round. A leak grows in every round; an allocator that takes another arena grows in one.
#: Measured for 1,000 requests: 4 to 16 KiB; 170 KiB with messages to a detokenizer that does not
#: exist; 1.8 MiB with every row kept.
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
