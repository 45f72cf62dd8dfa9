"""Where tests run: on the GPU if there is one; else Triton kernels run in its interpreter."""

import os

import torch

if not torch.cuda.is_available():
    # Why here: Triton reads it when kernels, and its own library, are imported.
    os.environ["TRITON_INTERPRET"] = "1"

# Why: tiny models gain nothing from threads, and test processes run side by side.
torch.set_num_threads(1)
