"""Our own kernels for residual nets on a GPU."""
