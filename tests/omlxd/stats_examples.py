"""A full answer of ``stats``, for tests of what is made of it."""

from __future__ import annotations

from omlxd.schema import SCHEMA, RateStats, Stats

GIB = 1 << 30


def rates(scale: float) -> RateStats:
    return {
        "hits_ram": 12.5 * scale,
        "hits_ssd": 2.0 * scale,
        "misses": 4.0,
        "hit_percent": 78.4 if scale else None,
        "stored_bytes": 3e6 * scale,
        "spilled_bytes": 2e6 * scale,
        "restored_bytes": 5e6 * scale,
        "loaded_bytes": 9e6 * scale,
    }


def example() -> Stats:
    return {
        "schema": SCHEMA,
        "daemon": {
            "version": "0.1.0",
            "pid": 4711,
            "boot": "ab" * 16,
            "state": "serving",
            "uptime": 12_345.6,
            "socket": "/run/user/1000/omlxd/omlxd.sock",
            "config_file": "/home/ann/.config/omlxd/config.toml",
            "log_level": "info",
            "config_problem": None,
            "needs_restart": [],
        },
        "health": "trouble",
        "warnings": ["the SSD is full: 1.0 GiB of blocks wait in RAM"],
        "ram": {
            "limit": 8 * GIB,
            "used": 5 * GIB,
            "mapped": 6 * GIB,
            "blocks": 2_345,
            "payload_bytes": 5 * GIB - 4096,
            "pinned_bytes": GIB,
            "leases": 3,
            "leased_bytes": GIB // 2,
            "reservations": 1,
            "reserved_bytes": 2 << 20,
            "policy": "lru",
            "largest_free": GIB,
        },
        "ssd": {
            "state": "full",
            "path": "/home/ann/.cache/omlxd/store",
            "limit": 100 * GIB,
            "used": 97 * GIB,
            "blocks": 54_321,
            "payload_bytes": 120 * GIB,
            "stored_bytes": 95 * GIB,
            "policy": "lru",
            "mode": "write_back",
            "codec": "auto",
            "free": 12 * GIB,
            "min_free": 5 * GIB,
            "dirty_blocks": 12,
            "dirty_bytes": 24 << 20,
            "max_dirty": 2 * GIB,
            "queue": 2,
            "quarantined": 1,
            "written_bytes": 40 * GIB,
            "written_per_day": 11.5 * GIB,
            "read_bytes": 80 * GIB,
            "life_years": 41.5,
        },
        "rates": {"1m": rates(1), "5m": rates(0.5), "15m": rates(0)},
        "counts": {"hits_ram": 1000, "hits_ssd": 200, "misses": 300, "declined_no_room": 7},
        "evictions": {"ram.evicted": 20, "ssd.limit": 5},
        "histograms": {"load_seconds": {"bounds": [0.001, 0.01, 0.1], "counts": [5, 9, 10, 11], "sum": 0.7}},
        "namespaces": [
            {
                "id": f"{index:02x}" * 32,
                "model": f"mlx-community/A-Rather-Long-Model-Name-{index}B-Instruct-4bit",
                "fingerprint": "f" * 64,
                "block_tokens": 64,
                "retired": index == 1,
                "watched": index == 2,
                "ram_blocks": 1000 * index,
                "ram_bytes": index * GIB,
                "ssd_blocks": 20_000,
                "ssd_bytes": 30 * GIB,
                "counts": {"hits_ram": 10, "misses": 30},
            }
            for index in range(15)
        ],
        "clients": [
            {
                "id": index,
                "name": f"mlx_lm_server {index} with a name that is far too long for a column",
                "pid": 1000 + index,
                "uid": 501,
                "connected": 90_000.0,
                "leases": index,
                "leased_bytes": index << 20,
                "oldest_lease": 3.0,
                "reserved_bytes": 0,
                "requests": 1234,
            }
            for index in range(3)
        ],
    }
