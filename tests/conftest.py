"""One thread: on a small shared machine two are several times slower."""

import torch

torch.set_num_threads(1)
