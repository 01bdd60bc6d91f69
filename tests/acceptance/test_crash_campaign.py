"""A sample of the kill -9 campaign; the whole is a command of its own."""

import pytest

from tests.acceptance.crash_campaign import run_campaign


@pytest.mark.acceptance
@pytest.mark.slow
def test_nothing_is_lost_doubled_or_left_by_kills_in_every_window():
    """Accepted jobs end, none runs twice, nothing survives, and the log verifies."""
    campaign = run_campaign(random_kills=3, each=2, seed=7)

    assert campaign.problems == []
    assert sum(campaign.kills.values()) == 13
