"""`dspark bench transfer`: what is asked for, and what the figures mean, on times that are made up."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.handoffs import request_figures
from common.errors import ConfigError
from services.cli.main import main
from services.cli.transfer_bench.limits import limit_of, range_cost_s
from services.cli.transfer_bench.patterns import Pattern, parse_patterns, parse_size, size_name
from services.cli.transfer_bench.results import Rate, Results, Sample

MIB = 1 << 20
WHOLE = Pattern(size_bytes=64 * MIB, num_ranges=1)
SCATTERED = Pattern(size_bytes=64 * MIB, num_ranges=1024)


def rate(seconds: float, *, cores: float = 0.5) -> Rate:
    sample = Sample(seconds=seconds, sender_cpu_s=cores * seconds, receiver_cpu_s=0.1 * seconds)
    return Rate.of(64 * MIB, [sample])


def results(engine: str, whole: Rate, scattered: Rate, *, is_one_host: bool = True) -> Results:
    """Memory copies 64 MiB in 10 ms, a TCP connection in 40 ms."""
    return Results(
        is_one_host=is_one_host,
        memcpy={64 * MIB: rate(0.01)},
        raw_tcp={64 * MIB: rate(0.04)},
        engines={engine: {WHOLE: whole, SCATTERED: scattered}},
        missing={},
    )


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4MiB", 4 * MIB), ("64 KiB", 65536), ("1GiB", 1 << 30), ("512B", 512), (" 4096 ", 4096)],
)
def test_sizes_are_read_with_their_units(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes
    assert parse_size(size_name(num_bytes)) == num_bytes


@pytest.mark.parametrize("text", ["", "0", "-1MiB", "4MB", "1.5MiB", "5GiB", "MiB"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"'{text}' is not a size"):
        parse_size(text)


def test_every_size_is_sent_in_every_number_of_ranges() -> None:
    assert [p.name for p in parse_patterns(("64MiB", "4MiB"), ("64", "1"))] == [
        "4MiB.1_range",
        "4MiB.64_ranges",
        "64MiB.1_range",
        "64MiB.64_ranges",
    ]
    with pytest.raises(ConfigError, match="4MiB cannot be divided into 3 equal ranges"):
        parse_patterns(("4MiB",), ("3",))
    with pytest.raises(ConfigError, match="'x' is not a number of ranges"):
        parse_patterns(("4MiB",), ("x",))


def test_ranges_cover_both_sides_once_and_only_few_stay_neighbours() -> None:
    ranges = SCATTERED.ranges()
    every = list(range(0, 64 * MIB, 65536))
    assert [r.source_offset for r in ranges] == every
    assert sorted(r.destination_offset for r in ranges) == every
    offsets = [r.destination_offset for r in ranges]
    assert sum(b - a == 65536 for a, b in itertools.pairwise(offsets)) < 10
    assert list(ranges) == list(SCATTERED.ranges()), "both ends must mean the same"


def test_a_rate_is_that_of_the_median_transfer() -> None:
    samples = [Sample(seconds=s, sender_cpu_s=s / 2) for s in (0.1, 9.0, 0.2)]
    median = Rate.of(1000, samples)
    assert median.bytes_per_s == pytest.approx(5000)
    assert median.sender_cores == pytest.approx(0.5)


def test_shares_are_of_the_same_size_and_of_the_engines_own_link() -> None:
    nixl = results("nixl", rate(0.02), rate(0.05))
    assert nixl.over_memcpy("nixl", WHOLE) == nixl.link_share("nixl", WHOLE) == pytest.approx(0.5)
    assert nixl.over_raw_tcp("nixl", WHOLE) == pytest.approx(2.0)
    apart = results("nixl", rate(0.05), rate(0.05), is_one_host=False)
    assert apart.link_share("nixl", WHOLE) == pytest.approx(0.8)
    assert results("grpc", rate(0.08), rate(0.08)).link_share("grpc", WHOLE) == pytest.approx(0.5)


def test_figures_have_flat_names() -> None:
    figures = results("nixl", rate(0.02), rate(0.04)).figures()
    assert figures["nixl.64MiB.1024_ranges.over_raw_tcp"] == pytest.approx(1.0)
    assert figures["nixl.64MiB.1_range.bytes_per_s"] == pytest.approx(64 * MIB / 0.02)
    assert figures["memcpy.64MiB.bytes_per_s"] == pytest.approx(64 * MIB / 0.01)


def test_a_range_costs_what_it_adds() -> None:
    cost_s = range_cost_s({WHOLE: rate(0.02), SCATTERED: rate(0.02 + 1023e-5)})
    assert cost_s == pytest.approx(1e-5)
    assert range_cost_s({WHOLE: rate(0.02)}) is None
    assert range_cost_s({WHOLE: rate(0.02), SCATTERED: rate(0.01)}) is None


@pytest.mark.parametrize(
    ("engine", "seconds", "cores", "expected"),
    [
        ("nixl", 0.011, 1.0, "91% of memcpy at 64MiB: the link is the limit"),
        ("nixl", 0.04, 1.0, "UCX may have found no shared memory"),
        ("nixl", 0.02, 1.0, "CPU is the limit, 1.0 cores at the sender"),
        ("grpc", 0.2, 0.9, "20% of raw TCP at 64MiB: CPU is the limit"),
        ("mooncake", 0.2, 0.3, "waiting is the limit"),
    ],
)
def test_one_sentence_says_what_limits_an_engine(
    engine: str, seconds: float, cores: float, expected: str
) -> None:
    measured = rate(seconds, cores=cores)
    assert expected in limit_of(results(engine, measured, measured), engine)


def test_a_range_cost_is_told_with_the_length_that_it_equals() -> None:
    measured = results("grpc", rate(0.0625), rate(0.0625 + 1023e-5))
    assert limit_of(measured, "grpc").endswith(
        "a range costs 10.0 µs, so ranges below 10KiB halve the rate."
    )


def test_percentiles_of_hand_offs_are_those_of_requests() -> None:
    figures = request_figures([0.01] * 98 + [0.02, 0.03])
    assert figures["transfer.handoff.p50_s"] == pytest.approx(0.01)
    assert figures["transfer.handoff.p99_s"] == pytest.approx(0.0201)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--sizes", "4MB"), "'4MB' is not a size"),
        (("--ranges", "1,3"), "cannot be divided into 3"),
        (("--engines", "rdma"), "transfer engine is 'rdma'"),
        (("--engines", "auto"), "auto is none"),
        (("--serve", "50070"), "give host:port"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    flags: tuple[str, str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "transfer", *flags]) == 2
    assert expected in capsys.readouterr().err
