"""The cases of tests/host/test_gpu_latent.py on a GPU: latent attention, kernel by kernel."""

import pytest

from tests.host.test_gpu_latent import (  # noqa: F401
    test_a_sequence_does_not_feel_its_neighbours,
    test_decode_is_a_prefill_of_one_token,
    test_every_place_of_a_chunk_in_its_blocks,
    test_fp8_pages,
    test_heads,
    test_padding_of_a_captured_graph,
    test_products_of_heads,
    test_ragged_batches,
    test_rows_go_into_their_pages,
    test_widths,
)

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("runner")]
