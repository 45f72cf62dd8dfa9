"""Matrix products whose rows don't depend on their position, for Triton's interpreter.

numpy's product may round a row differently in another position of the same matrix; tensor cores
compute each row alike. Without this fixture no test here could check that a row has the same bits
in any batch.
"""

import numpy as np
import pytest
import torch


@pytest.fixture
def row_products(monkeypatch):
    """Makes `tl.dot` multiply row by row where kernels are interpreted."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        dtype = d.data.dtype
        right = np.ascontiguousarray(b.data.astype(dtype))
        rows = [row.astype(dtype) @ right for row in a.data]
        return interpreter.TensorHandle(np.stack(rows) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
