"""The numbers that the paper prints, as it prints them: rows quoted from others first, then the authors' own.

Their names are those of `ROWS`, after our names for the losses; quoted rows have other names. The last three texts are
from the publications of systems that it compares with, or might.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

TABLE1 = """
                   CIFAR-100         | ImageNet-Subset   | ImageNet
iCaRL              57.17 52.57     – | 65.04 59.53     – | 51.36 46.72
BiC                59.36 54.20 50.00 | 70.07 64.96 57.73 | 62.65 58.72
LUCIR (reported)   63.42 60.18     – | 70.47 68.09     – | 64.34 61.28
LUCIR w/ Mnemonics 63.34 62.28 60.96 | 72.58 71.37 69.74 | 64.54 63.01
LUCIR w/ DDE       65.27 62.36     – | 72.34 70.20     – | 67.51 65.77
PODNet (reported)  64.83 63.19 60.72 | 75.54 74.33 68.31 | 66.95 64.13
PODNet w/ DDE      65.42 64.12     – | 76.71 75.41     – | 66.42 64.71
TPCIL              65.34 63.58     – | 76.27 74.81     – | 64.89 62.88
IL-Baseline        43.80 37.00 30.57 | 51.52 42.22 30.96 | 43.23 36.70
IL-Baseline, Balanced  62.22 58.32 52.10 | 72.57 68.25 61.49 | 66.45 62.14
IL-Baseline, Meta  64.11 60.08 49.63 | 72.88 69.26 60.70 | 66.15 61.59
LUCIR              63.37 60.88 57.07 | 70.25 67.84 63.23 | 66.69 64.06
LUCIR, Balanced    64.83 62.36 58.38 | 71.18 70.66 65.10 | 67.81 66.47
PODNet             64.46 62.69 60.63 | 74.97 71.57 62.67 | 65.20 62.87
PODNet, Balanced   67.77 66.57 64.64 | 76.08 74.93 69.46 | 69.67 68.65
"""
"""after 5, 10 and 25 steps (ImageNet: 5 and 10); – where the paper has none"""

TABLE2 = """
iCaRL                  – 63.70
EEIL                   – 72.20
BiC                    – 84.00
SS-IL                  65.20 86.70
IL-Baseline            46.65 68.74
IL-Baseline, Balanced  64.15 85.65
IL-Baseline, Meta      63.57 85.43
LUCIR                  60.40 82.31
LUCIR, Balanced        60.75 84.31
PODNet                 62.58 83.50
PODNet, Balanced       64.08 85.71
"""

TABLE3 = """
                   CIFAR-100   | ImageNet-Subset | ImageNet
SPB                60.90 60.40 | 68.70 67.20 | 57.80     –
SPB-I              62.60 62.70 | 70.10 69.80 | 58.00     –
SPB-M              65.50 65.20 | 71.70 70.60 | 59.70     –
DDE                59.11 55.31 | 69.22 65.51 |     –     –
NCM                59.80 59.52 | 65.91 65.71 | 59.92 59.59
SLDA               60.20 60.13 | 67.07 66.84 | 61.69 61.47
LUCIR              43.71 32.08 | 60.70 47.97 | 51.19 39.72
LUCIR, Balanced    54.68 50.87 | 58.63 57.71 | 63.29 62.90
LUCIR, Relaxed     59.43 54.93 | 66.27 65.12 | 67.07 65.07
PODNet             41.85 35.87 | 66.61 55.14 | 47.65 37.22
PODNet, Balanced   63.31 62.39 | 63.94 61.98 | 55.00 54.62
PODNet, Relaxed    65.66 63.82 | 72.56 70.99 | 68.50 67.38
"""

TABLE4 = """
IL-Baseline            24.83 30.59 37.27 43.80 52.99
IL-Baseline, Balanced  51.55 56.93 60.11 62.22 64.44
IL-Baseline, Meta      –     62.13 63.02 64.11 65.60
"""
"""with 1, 5, 10, 20 and 50 images of every class; Meta needs two"""

TABLE5 = """
α 0.1    68.38 51.54 62.68 | 63.43 44.71 57.68
α 0.25   63.99 54.88 64.09 | 60.28 47.86 59.40
α 0.5    58.78 55.44 63.80 | 56.48 49.62 59.52
α 1      52.08 54.55 62.22 | 51.01 49.57 58.32
Meta     61.20 55.21 64.11 | 60.39 49.65 60.08
"""
"""final on base classes, final, average incremental: after 5 steps, then after 10"""

TABLE6 = """
IL-Baseline            43.80
memory oversampling    49.75
class oversampling     55.95
loss rescaling         57.01
balanced finetuning    59.46
separated softmax      61.21
Balanced               62.22
Meta                   64.11
"""

CONFUSION = """
IL-Baseline            31.25
IL-Baseline, Balanced  54.76
IL-Baseline, Meta      55.35
"""
"""final accuracy, in the captions of the confusion matrices"""

TEXT = """
                                             ImageNet-Subset               | ImageNet
LUCIR, 5 steps, no memory                    82.12 29.76     – 38.36     – |     –     –
LUCIR, Balanced, 5 steps, no memory          81.16 79.44 04.56 42.00     – |     –     –
PODNet, Relaxed ε 1%, 5 steps, no memory         –     –     –     – 74.40 |     –     –
PODNet, Balanced, 5 steps, 20 kept               –     –     –     –     – | 64.40     –
LUCIR, ten equal steps                           –     –     –     –     – | 48.30     –
LUCIR, Balanced, ten equal steps                 –     –     –     –     – | 51.41     –
LUCIR without fine-tuning, ten equal steps       –     –     –     –     – | 40.44 56.41
"""
"""what the text says of runs and no table has: on ImageNet-Subset after the base step, then final on base and on later
classes, final, and average; on ImageNet final and average"""

GEODL = """
GeoDL  65.14 65.03 63.12
"""
"""around LUCIR, after 5, 10 and 25 steps, in its own paper"""

SPB_ABLATION = """
SPB    36.40
"""
"""without its weights, after 5 steps without memory, in its own paper"""

MNEMONICS = """
LwF                 52.44 48.47 45.75
LwF w/ Mnemonics    54.21 52.72 51.59
iCaRL               58.03 53.01 48.47
iCaRL w/ Mnemonics  60.01 57.37 54.13
"""
"""after 5, 10 and 25 steps, in the README of its authors' code, whose commands for CIFAR-100 keep 2,000 images"""

EPSILONS = ("0", "0.02", "0.1", "0.2", "0.5", "1", "2", "10", "100")
"""ε in percent of the images of a class; the paper's figure prints no numbers"""


def parse_numbers(text: str) -> Iterator[tuple[str, list[float | None]]]:
    """The rows of a text above: a name and its numbers. A headline, which has none, is left out."""
    for line in text.replace("|", " ").splitlines():
        if found := re.fullmatch(r"(.+?)((?: +(?:–|\d\d\.\d\d))+)", line):
            yield found[1], [None if word == "–" else float(word) for word in found[2].split()]
