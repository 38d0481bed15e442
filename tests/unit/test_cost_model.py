"""The cost model: the formulas, their limits, and that the page shows what it computes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # the script's modules are beside it

import cost_model
import report
from cost_model import BACKWARD, Link, Model, Network, efficiency, flat, hierarchical, ring, step

links = st.builds(Link, st.floats(1e-7, 1e-2), st.floats(1e6, 1e12))
sizes = st.floats(1e3, 1e10)
ranks = st.integers(1, 512)
models = st.builds(Model, st.floats(1e-4, 10), sizes)
NEARLY = 1 + 1e-9


@given(ranks, sizes, st.floats(1e6, 1e12))
def test_each_rank_sends_its_bytes_twice_but_for_its_own_part(count: int, size: float, bandwidth: float) -> None:
    without_latency = ring(count, size, Link(0.0, bandwidth))
    assert without_latency == pytest.approx(2 * (count - 1) / count * size / bandwidth)
    assert without_latency < 2 * size / bandwidth


@given(ranks, st.floats(1e-7, 1e-2))
def test_no_bytes_cost_the_latency_of_all_messages(count: int, latency: float) -> None:
    assert ring(count, 0.0, Link(latency, 1.0)) == pytest.approx(2 * (count - 1) * latency)


def test_a_ring_of_two_over_a_link_of_one_gigabyte() -> None:
    assert ring(2, 1e9, Link(1e-3, 1e9)) == pytest.approx(1.002)
    assert ring(4, 1e9, Link(1e-3, 1e9)) == pytest.approx(1.506)


@given(ranks, sizes, links)
def test_more_ranks_more_bytes_and_a_slower_link_take_longer(count: int, size: float, link: Link) -> None:
    seconds = ring(count, size, link)
    assert ring(count + 1, size, link) > seconds
    assert ring(count, size * 2, link) >= seconds
    assert ring(count, size, Link(link.latency, link.bandwidth / 2)) >= seconds


@given(st.integers(1, 512), sizes, links)
def test_islands_of_one_are_a_ring(count: int, size: float, link: Link) -> None:
    network = Network(link)
    assert flat(count, size, network) == ring(count, size, link)
    assert hierarchical(count, size, network) == pytest.approx(ring(count, size, link))


@given(st.sampled_from([2, 4, 8]), st.integers(2, 64), sizes)
def test_a_hierarchy_of_free_islands_costs_a_ring_over_the_islands(island: int, islands: int, size: float) -> None:
    network = Network(Link(1e-5, 1e9), island, Link(0.0, 1e30))
    assert hierarchical(island * islands, size, network) == pytest.approx(ring(islands, size, Link(1e-5, 1e9)))
    assert hierarchical(island * islands, size, network) < flat(island * islands, size, network)


@given(st.sampled_from([2, 4, 8]), sizes, links)
def test_in_one_island_the_network_does_not_matter(island: int, size: float, link: Link) -> None:
    network = Network(link, island, Link(1e-6, 1e11))
    assert flat(island, size, network) == hierarchical(island, size, network) == ring(island, size, Link(1e-6, 1e11))


def test_islands_must_be_full() -> None:
    with pytest.raises(ValueError, match="Islands of 4 can't have 6 ranks"):
        hierarchical(6, 1e6, Network(Link(1e-5, 1e9), 4, Link(1e-6, 1e10)))


@given(models, st.floats(0, 100), st.floats(0, BACKWARD))
def test_a_step_takes_between_the_longer_and_the_sum(model: Model, reduction: float, overlap: float) -> None:
    seconds = step(model, reduction, overlap)
    assert max(model.compute, reduction) <= seconds * NEARLY
    assert seconds <= (model.compute + reduction) * NEARLY
    assert 0 < efficiency(model, reduction, overlap) <= 1
    assert efficiency(model, reduction, 0.0) <= efficiency(model, reduction, overlap) * NEARLY


def test_what_fits_beside_the_backward_pass_costs_nothing() -> None:
    model = Model(compute=3.0, size=1.0)
    assert efficiency(model, 2.0, BACKWARD) == 1.0
    assert efficiency(model, 3.0, BACKWARD) == pytest.approx(0.75)
    assert efficiency(model, 3.0, 0.0) == pytest.approx(0.5)


def test_the_measured_efficiencies_of_the_paper_lie_between_no_and_full_overlap() -> None:
    for model, measured in cost_model.PAPER.values():
        low, high = cost_model.prediction(model, cost_model.PAPER_HOSTS, cost_model.PAPER_RANKS)
        assert low <= measured <= high


def test_the_page_shows_what_the_model_says() -> None:
    begin, end = report.markers("cost model")
    shown = cost_model.PAGE.read_text().split(begin)[1].split(end)[0]
    assert cost_model.paper_table() in shown
    assert cost_model.networks_table() in shown
