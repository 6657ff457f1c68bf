"""Imported by processes that others are forked from: these begin with all that takes long the first time."""

import os

import attempts  # noqa: F401
import sklearn.cluster  # noqa: F401  PODNet's
import torch
from squares import READ_DIGITS

import equipoise.cli.run
import equipoise.cli.speed
import equipoise.cli.sweep  # noqa: F401
from equipoise import Learner, Recipe
from equipoise.runs.environment import hash_code

torch.set_num_threads(1)
os.fsync = lambda fd: None  # as in conftest.py
hash_code()  # reads the whole source
READ_DIGITS()
Learner(memory=1, recipe=Recipe(epochs=1), device="cpu").learn(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), [0, 0, 1, 1])
