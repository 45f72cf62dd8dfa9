"""What the tests for a GPU ask of an engine is something that an engine takes; seen without one."""

import pytest

from tests.gpu import test_overlap_gpu


@pytest.mark.parametrize("options", test_overlap_gpu.CACHES)
def test_the_overlapped_loop_is_tested_with_options_that_go_together(options):
    on_cpu = {"device": "cpu", "dtype": "float32", "attention_backend": "naive"}
    engine = test_overlap_gpu.engine_of(**options, **on_cpu)
    assert engine.info.num_kv_blocks >= 24
    engine.close()
