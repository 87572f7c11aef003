"""Before any import of the project: without a GPU, Triton kernels run in its interpreter.

Kernels are decorated at import, so the choice has to stand first. Ops on CPU tensors take their CPU twin either way.
"""

import os

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads a model

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
