"""The only training loop, and the ways in which its steps are launched."""
