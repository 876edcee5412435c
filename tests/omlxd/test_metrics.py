from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families

from omlxd.metrics import MetricsServer, prometheus_text
from tests.omlxd.stats_examples import GIB, example


def samples() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    stats = example()
    stats["namespaces"] = stats["namespaces"][1:2]
    stats["namespaces"][0]["counts"] = {"hits_ram": 10, "hits_ssd": 5, "misses": 30, "declined_no_room": 2, "stored": 7}
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(prometheus_text(stats).decode())
        for sample in family.samples
    }


def value(name: str, **labels: str) -> float:
    return samples()[name, frozenset(labels.items())]


def test_text_is_what_prometheus_parses_and_has_the_tiers() -> None:
    assert value("omlxd_tier_used_bytes", tier="ram") == 5 * GIB
    assert value("omlxd_tier_limit_bytes", tier="ssd") == 100 * GIB
    assert value("omlxd_ram_pinned_bytes") == GIB
    assert value("omlxd_ssd_dirty_bytes") == 24 << 20
    assert value("omlxd_ssd_ok") == 0


def test_counts_of_a_namespace_carry_model_tier_and_reason() -> None:
    who = {"model": "mlx-community/A-Rather-Long-Model-Name-1B-Instruct-4bit", "namespace": "01" * 8}
    assert value("omlxd_hits_total", tier="ram", **who) == 10
    assert value("omlxd_hits_total", tier="ssd", **who) == 5
    assert value("omlxd_misses_total", **who) == 30
    assert value("omlxd_declined_total", reason="no_room", **who) == 2
    assert value("omlxd_stored_blocks_total", **who) == 7


def test_evictions_carry_tier_and_cause() -> None:
    assert value("omlxd_evictions_total", tier="ssd", cause="limit") == 5


def test_histograms_are_cumulative_with_a_sum() -> None:
    assert value("omlxd_load_seconds_bucket", le="0.01") == 9
    assert value("omlxd_load_seconds_bucket", le="+Inf") == 11
    assert value("omlxd_load_seconds_sum") == 0.7


def test_daemon_without_an_ssd_tier_has_no_figures_for_it() -> None:
    stats = example()
    stats["ssd"] = None
    assert b"omlxd_ssd" not in prometheus_text(stats)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def ask(port: int, request: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.encode())
    await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return answer.decode()


@pytest.mark.parametrize(
    ("request_line", "host", "status"),
    [
        ("GET /metrics HTTP/1.1", "127.0.0.1:1", "200 OK"),
        ("GET /metrics?x=1 HTTP/1.0", "localhost", "200 OK"),
        ("GET / HTTP/1.1", "127.0.0.1", "404 Not Found"),
        ("POST /metrics HTTP/1.1", "127.0.0.1", "405 Method Not Allowed"),
        ("GET /metrics HTTP/1.1", "evil.example:80", "403 Forbidden"),
        ("nonsense", "localhost", "404 Not Found"),
    ],
)
def test_http_answers_and_refuses(request_line: str, host: str, status: str) -> None:
    async def scenario() -> None:
        server = MetricsServer(example)
        port = free_port()
        await server.listen(f"127.0.0.1:{port}")
        answer = await ask(port, f"{request_line}\r\nHost: {host}\r\n\r\n")
        assert answer.startswith(f"HTTP/1.1 {status}\r\n")
        assert ("omlxd_tier_used_bytes" in answer) == (status == "200 OK")
        await server.close()

    asyncio.run(scenario())


def test_address_can_be_changed_and_switched_off_live() -> None:
    async def scenario() -> None:
        server = MetricsServer(example)
        first, second = free_port(), free_port()
        await server.listen(f"127.0.0.1:{first}")
        await server.listen(f"127.0.0.1:{second}")
        with pytest.raises(OSError, match="onnect"):
            await ask(first, "")
        assert "200 OK" in await ask(second, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await server.listen("")
        with pytest.raises(OSError, match="onnect"):
            await ask(second, "")

    asyncio.run(scenario())


def test_client_that_talks_too_much_is_cut_off() -> None:
    async def scenario() -> None:
        server = MetricsServer(example)
        port = free_port()
        await server.listen(f"127.0.0.1:{port}")
        with suppress(ConnectionResetError):  # the other way in which the system tells it
            assert await ask(port, "x" * 200_000) == ""
        await server.close()

    asyncio.run(scenario())
