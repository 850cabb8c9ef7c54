"""The cases of tests/host/test_gpu_experts.py on a GPU: routers and experts, kernel by kernel."""

import pytest

from tests.host.test_gpu_experts import (  # noqa: F401
    test_a_token_does_not_feel_its_neighbours,
    test_activations,
    test_choices_of_rows_that_are_mostly_zero,
    test_loads,
    test_mixtures,
    test_of_equal_experts_and_groups_the_first_are_chosen,
    test_pairs_stand_in_the_order_of_their_experts,
    test_routes,
    test_rows_that_are_no_numbers_choose_experts_that_there_are,
    test_tiles,
    test_tokens_with_fewer_experts_than_others_or_none,
)

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("runner")]
