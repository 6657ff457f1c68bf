"""The training loop, and the ways to launch its steps."""
